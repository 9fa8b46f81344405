"""Engines are lazy, shared by configuration, and released."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_minipic import ChatMiniPIC, MiniPIC, span_block

from minipic_backend import (
    ConfigurationError,
    EngineClosedError,
    EngineStartError,
    MiniPICError,
    Prompt,
    Span,
    Text,
)
from minipic_backend.engines import shared as shared_engines
from minipic_backend.engines.hold import EngineHold
from minipic_backend.engines.shared import EngineSpec
from minipic_backend.testing import FakeEngine


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeEngine]]:
    """Every engine that the registry starts, slowly."""
    engines: list[FakeEngine] = []

    def create(spec: EngineSpec) -> FakeEngine:
        time.sleep(0.05)
        engines.append(FakeEngine(model=spec.model))
        return engines[-1]

    monkeypatch.setattr(shared_engines, "create_engine", create)
    yield engines
    shared_engines.close_all()


def test_making_models_starts_nothing(started: list[FakeEngine]) -> None:
    models = [ChatMiniPIC(model="m") for _ in range(10)]
    assert repr(models)
    models[0].close()
    assert started == []


def test_shared_by_configuration(started: list[FakeEngine]) -> None:
    options: dict[str, Any] = {"max_model_len": 64, "markers": ["a", "b"]}
    models: list[ChatMiniPIC | MiniPIC] = [
        ChatMiniPIC(model="m", engine_options=options),
        ChatMiniPIC(model="m", engine_options=dict(reversed(options.items())), temperature=1),
        MiniPIC(model="m", engine_options=options, technique="full"),
    ]
    for model in models:
        model.invoke("x")
    assert len(started) == 1
    ChatMiniPIC(model="other").invoke("x")
    ChatMiniPIC(model="m", engine_options={"max_model_len": 65}).invoke("x")
    assert len(started) == 3


def test_32_threads_at_once_start_one_engine(started: list[FakeEngine]) -> None:
    llm = ChatMiniPIC(model="m")
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda _: llm.invoke("x").content, range(32)))
    assert set(answers) == {"A fake answer."}
    assert len(started) == 1


def test_starting_does_not_block_the_event_loop(
    started: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    create = shared_engines.create_engine
    monkeypatch.setattr(
        shared_engines, "create_engine", lambda spec: time.sleep(0.3) or create(spec)
    )

    async def main() -> int:
        asking = [asyncio.create_task(ChatMiniPIC(model="m").ainvoke("x")) for _ in range(4)]
        ticks = 0
        while not all(task.done() for task in asking):
            await asyncio.sleep(0.01)
            ticks += 1
        await asyncio.gather(*asking)
        return ticks

    assert asyncio.run(main()) > 10
    assert len(started) == 1


def test_the_last_one_to_close_closes_the_engine(started: list[FakeEngine]) -> None:
    first, second = ChatMiniPIC(model="m"), MiniPIC(model="m")
    first.invoke("x")
    second.invoke("x")
    first.close()
    first.close()
    assert not started[0].closed
    with pytest.raises(EngineClosedError, match="make a new one"):
        first.invoke("x")
    with second:
        second.invoke("x")
    assert started[0].closed
    assert shared_engines._shared == {}
    ChatMiniPIC(model="m").invoke("x")
    assert len(started) == 2


async def in_stream(llm: Any, value: Any, options: dict[str, Any]) -> None:
    async for _ in llm.astream(value, **options):
        pass


WAYS: dict[str, Any] = {
    "invoke": lambda llm, value, options: llm.invoke(value, **options),
    "ainvoke": lambda llm, value, options: asyncio.run(llm.ainvoke(value, **options)),
    "stream": lambda llm, value, options: list(llm.stream(value, **options)),
    "astream": lambda llm, value, options: asyncio.run(in_stream(llm, value, options)),
    "batch": lambda llm, value, options: llm.batch([value, value], **options),
    "abatch": lambda llm, value, options: asyncio.run(llm.abatch([value, value], **options)),
    "each": lambda llm, value, options: llm.batch([value], return_exceptions=True, **options),
}


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}], ids=["plain", "options"])
@pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", [ChatMiniPIC, MiniPIC])
def test_every_way_of_asking_is_given_back_by_close(
    started: list[FakeEngine], kind: Any, ask: Any, options: dict[str, Any]
) -> None:
    """`MiniPIC` answers a call with spans, or options of its own, from a copy of the model."""
    with kind(model="m") as llm:
        ask(llm, [HumanMessage([span_block("doc"), "q"])], options)
        assert len(started) == 1
        assert not started[0].closed
    assert started[0].closed
    assert shared_engines._shared == {}
    with pytest.raises(EngineClosedError):
        llm.invoke("x")


@pytest.mark.parametrize("address", [None, "http://127.0.0.1:9/v1"])
def test_a_copy_for_one_call_asks_for_no_engine_of_its_own(
    started: list[FakeEngine], address: str | None
) -> None:
    prompt = Prompt([Span("doc"), Text("q")])
    with MiniPIC(model="m", base_url=address, timeout=60) as llm:
        copy = llm._with({"max_tokens": 3}, [llm._convert_input(prompt).to_string()])
        assert copy is not llm
        assert copy._get_engine() is llm._get_engine()
        llm.invoke(prompt)
    assert shared_engines._shared == {}


@pytest.mark.parametrize("kind", [ChatMiniPIC, MiniPIC])
@pytest.mark.parametrize("is_own", [True, False])
def test_only_the_first_call_waits_in_a_thread(
    started: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, kind: Any, is_own: bool
) -> None:
    llm = kind(model="m", engine=FakeEngine() if is_own else None)
    met: list[Any] = []
    meet = EngineHold.meet
    monkeypatch.setattr(EngineHold, "meet", lambda *args: (met.append(args), meet(*args)))
    value = [HumanMessage([span_block("doc"), "q"])]

    async def main() -> None:
        for _ in range(3):
            await llm.ainvoke(value)

    asyncio.run(main())
    assert len(met) == 1


@pytest.mark.parametrize("asked_first", [True, False])
@pytest.mark.parametrize("kind", [ChatMiniPIC, MiniPIC])
def test_copies_share_the_engine_unless_they_ask_for_another(
    started: list[FakeEngine], kind: Any, asked_first: bool
) -> None:
    llm = kind(model="m")
    if asked_first:
        llm.invoke("x")
    same = llm.model_copy(update={"temperature": 0.5})
    other = llm.model_copy(update={"model": "other"})
    own = llm.model_copy(update={"engine": FakeEngine(model="own")})
    models = [one._get_engine().model for one in (llm, same, other, own)]
    assert models == ["m", "m", "other", "own"]
    llm.close()
    with pytest.raises(EngineClosedError):
        same.invoke("x")
    for one in (other, own):
        one.invoke("x")
    other.close()
    assert shared_engines._shared == {}


def test_threads_that_ask_at_once_take_one_lease(started: list[FakeEngine]) -> None:
    for _ in range(20):
        with MiniPIC(model="m") as llm, ThreadPoolExecutor(8) as pool:
            leases = set(pool.map(lambda _: id(llm._hold.lease(llm)), range(8)))
        assert len(leases) == 1


def test_a_dropped_model_leaves_the_engine_warm_but_holds_nothing(
    started: list[FakeEngine],
) -> None:
    ChatMiniPIC(model="m").invoke("x")
    gc.collect()
    with ChatMiniPIC(model="m") as again:
        again.invoke("x")
        assert len(started) == 1
        assert not started[0].closed
    assert started[0].closed


def test_a_failed_start_can_be_tried_again(
    started: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    create, failures = shared_engines.create_engine, [EngineStartError("no memory")]

    def fail_once(spec: EngineSpec) -> Any:
        if failures:
            raise failures.pop()
        return create(spec)

    monkeypatch.setattr(shared_engines, "create_engine", fail_once)
    llm = ChatMiniPIC(model="m")
    with pytest.raises(EngineStartError, match="no memory"):
        llm.invoke("x")
    assert llm.invoke("x").content


def test_close_while_another_thread_starts(started: list[FakeEngine]) -> None:
    llm = ChatMiniPIC(model="m")
    errors: list[Exception] = []

    def ask() -> None:
        try:
            llm.invoke("x")
        except EngineClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.02)
    llm.close()
    thread.join()
    assert len(errors) == 1
    assert [engine.closed for engine in started] == [True]


def test_a_server_that_is_not_there_is_named() -> None:
    llm = ChatMiniPIC(model="m", base_url="http://127.0.0.1:9/v1", max_retries=0)
    with pytest.raises(MiniPICError, match=r"127\.0\.0\.1:9"):
        llm.invoke("x")
    with pytest.raises(MiniPICError, match=r"127\.0\.0\.1:9"):
        asyncio.run(llm.ainvoke("x"))


def test_options_of_an_embedded_engine_are_refused_for_a_server() -> None:
    address = "http://127.0.0.1:9/v1"
    llm = ChatMiniPIC(model="m", base_url=address, engine_options={"kv_cache_gib": 1})
    with pytest.raises(ConfigurationError, match="kv_cache_gib"):
        llm.invoke("x")


def test_key_of_a_specification() -> None:
    def key(**values: Any) -> Any:
        return EngineSpec("m", **values).key

    assert key(options={"a": {"b": [1, {2}]}}) == key(options={"a": {"b": (1, {2})}})
    assert key(options={"a": 1}) != key(options={"a": 2}) != key(base_url="x")
    assert key(client={"api_key": "1"}) == key(client={"api_key": "2"})
    assert key(base_url="x", client={"k": "1"}) != key(base_url="x", client={"k": "2"})
    hash(key(options={"a": object(), "b": bytearray(b"x")}))
