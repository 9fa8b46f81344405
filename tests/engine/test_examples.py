"""The examples run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Those that want a server run in tests/server.
EXAMPLES = sorted(
    path for path in (ROOT / "examples").glob("*.py") if not path.stem.startswith("serve_")
)


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} >= {"engine", "langchain_rag"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path) -> None:
    folders = [str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "warm" in done.stdout
