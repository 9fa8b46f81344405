"""Streams of ChatMiniPIC: pieces, ids, usage once at the end, callbacks, leaving early."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_minipic import ChatMiniPIC
from langchain_support import ANSWER, collect, last_of

from minipic_backend.testing import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(ANSWER)


@pytest.fixture
def llm(engine: FakeEngine) -> ChatMiniPIC:
    return ChatMiniPIC(model="m", engine=engine)


def test_streams_come_in_pieces_with_one_id(llm: ChatMiniPIC) -> None:
    for chunks in (list(llm.stream("x")), collect(llm.astream("x"))):
        assert [chunk.content for chunk in chunks] == ["Her", " name", " was", " Teutberga."]
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[0].id


def test_usage_and_name_once_on_the_last_chunk(llm: ChatMiniPIC) -> None:
    whole = llm.invoke("x")
    for chunks in (list(llm.stream("x")), collect(llm.astream("x"))):
        assert all(chunk.usage_metadata is None for chunk in chunks[:-1])
        assert all(not chunk.response_metadata for chunk in chunks[:-1])
        assert [chunk.chunk_position for chunk in chunks] == [None, None, None, "last"]
        merged = last_of(chunks)
        assert merged.usage_metadata == whole.usage_metadata
        assert merged.response_metadata["model_name"] == "m"
        assert merged.response_metadata["finish_reason"] == "stop"


def test_callbacks_see_tokens_and_usage(llm: ChatMiniPIC) -> None:
    class Tokens(BaseCallbackHandler):
        seen: list[str]

        def on_llm_new_token(self, token: Any, **_: Any) -> None:
            self.seen.append(token)

    handler, usage = Tokens(), UsageMetadataCallbackHandler()
    handler.seen = []
    list(llm.stream("x", config={"callbacks": [handler, usage]}))
    assert "".join(handler.seen) == ANSWER
    assert usage.usage_metadata["m"]["output_tokens"] == 4
    streaming = ChatMiniPIC(model="m", engine=FakeEngine(ANSWER), streaming=True)
    handler.seen = []
    assert streaming.invoke("x", config={"callbacks": [handler]}).content == ANSWER
    assert "".join(handler.seen) == ANSWER


def test_stream_events(llm: ChatMiniPIC) -> None:
    async def main() -> list[dict[str, Any]]:
        return [event async for event in llm.astream_events("x", version="v2")]

    events = asyncio.run(main())
    tokens = [e["data"]["chunk"].content for e in events if e["event"] == "on_chat_model_stream"]
    assert "".join(tokens) == ANSWER
    assert events[-1]["data"]["output"].usage_metadata["output_tokens"] == 4


def test_leaving_a_stream_aborts_the_request() -> None:
    engine = FakeEngine("word " * 1000, token_s=0.001)
    llm = ChatMiniPIC(model="m", engine=engine)
    stream = llm.stream("x")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert len(engine.aborted) == 1

    async def main() -> None:
        async for _ in llm.astream("x"):
            break
        await asyncio.sleep(0.05)
        assert len(engine.aborted) == 2

    asyncio.run(main())
