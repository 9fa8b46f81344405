"""Processes that tests look at, two at a time, on half of the cores each: most of what one takes is
imports, on one core.

    @pytest.mark.process(run=run)
    def test(done): …

`run(folder, model)` starts a process and waits for it, on a thread; `done` is what it returns.
Tests so marked come first: no other test shares the machine with their processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from minipic_backend.models import ensure_smollm2

__all__ = ["PACKAGES", "python", "script"]

_ROOT = Path(__file__).parents[1]
_AT_ONCE = 2

PACKAGES = os.pathsep.join(
    [str(_ROOT), str(_ROOT / "integrations"), os.environ.get("PYTHONPATH", "")]
)
"""A PYTHONPATH with this project's packages."""


def python(
    *arguments: str | Path, timeout: float = 300, **environment: str
) -> Callable[[Path, str], Any]:
    """A `run`: Python with these arguments and further variables, in a folder of its own."""

    def run(folder: Path, model: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": PACKAGES, **environment},
        )

    return run


def script(text: str, **names: object) -> Callable[[Path, str], Any]:
    """A `run`: a script, as a user runs it; `{model}` in it, and other names, are replaced."""

    def run(folder: Path, model: str) -> Any:
        path = folder / "script.py"
        path.write_text(text.format(model=repr(model), **names))
        return python(path, VLLM_LOGGING_LEVEL="ERROR")(folder, model)

    return run


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "process(run): see tests/side_by_side.py")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _run_of(item) is None)


@pytest.fixture(scope="session")
def _runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[Any]]]:
    """By test: what its process came to. All start when the first is asked for."""
    model = str(ensure_smollm2(progress=False))
    shares: SimpleQueue[set[int]] = SimpleQueue()
    cores = sorted(os.sched_getaffinity(0))
    for number in range(_AT_ONCE):
        shares.put(set(cores[number::_AT_ONCE] or cores))
    # A thread's processes inherit its cores: engines do not wait for cores that another one has.
    pool = ThreadPoolExecutor(_AT_ONCE, initializer=lambda: os.sched_setaffinity(0, shares.get()))
    yield {
        item.nodeid: pool.submit(run, tmp_path_factory.mktemp("process"), model)
        for item in request.session.items
        if (run := _run_of(item))
    }
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def done(request: pytest.FixtureRequest, _runs: Mapping[str, Future[Any]]) -> Any:
    """What `run` of the test's mark returned."""
    return _runs[request.node.nodeid].result()


def _run_of(item: pytest.Item) -> Callable[[Path, str], Any] | None:
    mark = item.get_closest_marker("process")
    return mark.kwargs["run"] if mark else None
