"""Whatever meets the end of an engine's process first: nobody waits without an end."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine.exceptions import EngineDeadError

from minipic_backend.engines.driver import EngineDriver
from minipic_backend.errors import EngineClosedError, EngineError, RequestAbortedError


class DyingLLM:
    """Stands in for vLLM's engine: what `dead` names finds its process gone."""

    renderer = SimpleNamespace(render_cmpl=lambda prompts: prompts)

    def __init__(self) -> None:
        self.dead: set[str] = set()

    def _do(self, name: str) -> None:
        if name in self.dead:
            raise EngineDeadError()

    def add_request(self, request_id: str, *args: Any, **kwargs: Any) -> str:
        self._do("add")
        return request_id

    def abort_request(self, request_ids: list[str], **kwargs: Any) -> None:
        self._do("abort")

    def step(self) -> list[Any]:
        self._do("step")
        time.sleep(0.005)
        return []


class Driver(EngineDriver):
    def __init__(self) -> None:
        super().__init__({}, separate_process=True)

    def _start(self, engine_args: dict[str, Any]) -> Any:
        return DyingLLM()

    def _stop(self) -> None:
        self.stopped = True


def answer(handle: Any) -> None:
    list(handle.deltas())


@pytest.mark.parametrize("first", ["add", "abort", "step", "call"])
def test_all_are_told(first: str) -> None:
    driver = Driver()
    waiting = [driver.submit([1], None, request_id=str(number)) for number in range(2)]
    driver.call(lambda llm: llm.dead.update({"add", "abort", first}))
    if first == "add":
        with pytest.raises(EngineError, match="The engine stopped") as caught:
            answer(driver.submit([1], None))
        assert isinstance(caught.value.__cause__, EngineDeadError)
    elif first == "abort":
        driver.abort("0")
        with pytest.raises(RequestAbortedError):
            answer(waiting.pop(0))
    elif first == "call":
        with pytest.raises(EngineError, match="The engine stopped"):
            driver.call(lambda llm: llm._do("abort"))
    for handle in waiting:
        with pytest.raises(EngineError, match="The engine stopped"):
            answer(handle)
    for ask in (lambda: driver.submit([1], None), lambda: driver.call(len)):
        with pytest.raises(EngineClosedError):
            ask()
    driver.close()
    assert driver.stopped


class CollectingDriver(EngineDriver):
    """Of an engine in this process, in whose step garbage is collected: another engine, dropped."""

    def __init__(self) -> None:
        self.garbage: EngineDriver | None = None
        self.stepping, self.go_on = threading.Event(), threading.Event()
        super().__init__({})

    def _start(self, engine_args: dict[str, Any]) -> Any:
        return SimpleNamespace(
            renderer=DyingLLM.renderer, step=self._collect,
            add_request=lambda request_id, *args, **kwargs: request_id,
            abort_request=lambda request_ids, **kwargs: None,
        )  # fmt: skip

    def _collect(self) -> list[Any]:
        self.stepping.set()
        if self.garbage is not None:
            self.go_on.wait(timeout=30)
            self.garbage.close()
            self.garbage = None
        time.sleep(0.005)
        return []

    def _stop(self) -> None:
        """It has no engine."""


def test_an_engine_that_is_collected_on_the_thread_of_another() -> None:
    dropped, other = CollectingDriver(), CollectingDriver()
    other.garbage = dropped
    handle = other.submit([1], None)
    assert other.stepping.wait(timeout=30)
    waiting = dropped.submit([1], None)  # for its turn to run its model
    while not dropped._handles:
        time.sleep(0.001)
    other.go_on.set()
    with pytest.raises(EngineClosedError):
        told(waiting)
    other.close()
    with pytest.raises(EngineClosedError):
        told(handle)
    dropped._thread.join(timeout=30)
    assert not dropped._thread.is_alive()


def told(handle: Any) -> None:
    found = handle._items.get(timeout=30)
    if isinstance(found, BaseException):
        raise found
