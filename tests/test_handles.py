"""Deltas on their way from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from minipic_backend import EngineError, MalformedSpansError
from minipic_backend.engines.driver import Delta, EngineDriver, FairLock, Handle


class Driver:
    """What a handle asks of its driver."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def handle(driver: Driver) -> Handle:
    return Handle(driver, "r")  # type: ignore[arg-type]


def deltas(count: int) -> list[Delta]:
    return [Delta([index], index == count - 1, None, None, 0.0) for index in range(count)]


async def test_all_deltas_wake_the_loop_once(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    wakes: list[Any] = []
    wake = loop.call_soon_threadsafe
    monkeypatch.setattr(
        loop, "call_soon_threadsafe", lambda *args: (wakes.append(args), wake(*args))[1]
    )
    reader = asyncio.ensure_future(handle.all_deltas())
    await asyncio.sleep(0)
    sent = deltas(50)
    thread = threading.Thread(target=lambda: [handle.put(delta) for delta in sent])
    thread.start()
    assert await reader == sent
    thread.join()
    assert len(wakes) == 1


async def test_all_deltas_of_a_request_that_is_over(handle: Handle, driver: Driver) -> None:
    sent = deltas(3)
    for delta in sent:
        handle.put(delta)
    assert await handle.all_deltas() == sent
    assert driver.aborted == []


async def test_an_error_ends_all_deltas(handle: Handle) -> None:
    reader = asyncio.ensure_future(handle.all_deltas())
    await asyncio.sleep(0)
    handle.put(deltas(2)[0])
    handle.put(EngineError("broken"))
    with pytest.raises(EngineError, match="broken"):
        await reader


async def test_cancelling_all_deltas_aborts(handle: Handle, driver: Driver) -> None:
    reader = asyncio.ensure_future(handle.all_deltas())
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert driver.aborted == ["r"]


async def test_streams_get_every_delta_as_it_comes(handle: Handle) -> None:
    sent = deltas(3)
    got = []
    handle.put(sent[0])
    async for delta in handle.adeltas():
        got.append(delta)
        if len(got) < 3:
            handle.put(sent[len(got)])
    assert got == sent


def test_when_the_engine_breaks_every_caller_hears_of_it() -> None:
    """Also those whose request is added by a command that waits, or cannot be aborted."""
    driver = object.__new__(EngineDriver)
    driver._handles, driver._engine_ids = {}, {}
    driver._commands = queue.Queue()
    driver._llm = None  # so that aborting fails
    early, late = (Handle(driver, name) for name in ("early", "late"))
    driver._handles["early"], driver._engine_ids["early"] = early, "early-1"
    driver._commands.put(lambda: driver._handles.__setitem__("late", late))
    driver._commands.put(None)
    driver._fail(EngineError("broken"))
    for handle in (early, late):
        with pytest.raises(EngineError, match="broken"):
            list(handle.deltas())
    assert not driver._handles


@pytest.mark.parametrize("wrapped", [False, True], ids=["ours", "in one of vLLM's"])
def test_a_refusal_in_vllms_front_end_stays_what_it_is(wrapped: bool) -> None:
    """Its type and token index; and vLLM forgets what it may have noted down."""
    aborted: list[list[str]] = []

    def refuse(*args: Any, **kwargs: Any) -> None:
        refusal = MalformedSpansError("A marker inside a block", 70)
        if wrapped:
            raise ValueError("refused") from refusal
        raise refusal

    driver = object.__new__(EngineDriver)
    driver._handles, driver._engine_ids, driver._closing = {}, {}, False
    driver._commands, driver._close_lock = queue.SimpleQueue(), threading.Lock()
    driver._llm = SimpleNamespace(
        renderer=SimpleNamespace(render_cmpl=lambda prompts: prompts),
        add_request=refuse,
        abort_request=aborted.append,
    )
    handle = driver.submit([1, 2], None, request_id="r")
    command = driver._commands.get()
    assert command is not None
    command()
    with pytest.raises(MalformedSpansError) as caught:
        list(handle.deltas())
    assert caught.value.token_index == 70
    assert aborted == [["r"]]
    assert not driver._handles


def test_who_gives_the_lock_back_and_wants_it_again_comes_last() -> None:
    lock = FairLock()
    had_it: list[str] = []

    def take(name: str) -> None:
        with lock:
            had_it.append(name)

    waiting = [threading.Thread(target=take, args=(name,)) for name in "abc"]
    with lock:
        for number, thread in enumerate(waiting, 2):
            thread.start()
            while len(lock._queue) < number:
                time.sleep(0.001)
        assert not had_it
    with lock:
        assert had_it == ["a", "b", "c"]
    for thread in waiting:
        thread.join()
    with pytest.raises(KeyError), lock:
        raise KeyError
    take("d")  # free again
