"""Whatever meets the end of an engine's process first: nobody waits without an end."""

from __future__ import annotations

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
