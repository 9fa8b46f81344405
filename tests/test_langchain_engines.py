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
from langchain_minipic import ChatMiniPIC, MiniPIC

from minipic_backend import (
    ConfigurationError,
    EngineClosedError,
    EngineStartError,
    MiniPICError,
)
from minipic_backend.engines import shared as shared_engines
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
