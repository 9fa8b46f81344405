"""The four ways to ask: sync, async, streamed, streamed async."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Literal, get_args

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.query_engine import BaseQueryEngine

__all__ = ["WAYS", "Answer", "Way", "ask", "run", "say"]

Way = Literal["sync", "async", "stream", "astream"]
WAYS: tuple[Way, ...] = get_args(Way)


@dataclass(frozen=True)
class Answer:
    """What came back: the text, its pieces where it was streamed, the response itself."""

    text: str
    pieces: tuple[str, ...]
    response: Any


def run(coroutine: Coroutine[Any, Any, Any], way: Way = "async") -> Any:
    """Run it in an event loop of its own."""
    return asyncio.run(coroutine)


def ask(engine: BaseQueryEngine, question: str, way: Way) -> Answer:
    """Ask a query engine, which was made with `streaming` as `way` wants it."""
    if way in ("sync", "stream"):
        response = engine.query(question)
        pieces: list[str] = []
        if isinstance(response, StreamingResponse):
            pieces = list(response.response_gen)
            return Answer("".join(pieces), tuple(pieces), response)
        return Answer(str(response), (), response)

    async def main() -> Answer:
        response = await engine.aquery(question)
        if isinstance(response, AsyncStreamingResponse):
            pieces = [piece async for piece in response.async_response_gen()]
            return Answer("".join(pieces), tuple(pieces), response)
        return Answer(str(response), (), response)

    answer: Answer = run(main())
    return answer


def say(engine: BaseChatEngine, message: str, way: Way) -> Answer:
    """One turn of a chat."""
    if way == "sync":
        response = engine.chat(message)
        return Answer(response.response, (), response)
    if way == "stream":
        streamed = engine.stream_chat(message)
        pieces = list(streamed.response_gen)
        if streamed.write_response_to_history_thread is not None:
            streamed.write_response_to_history_thread.join()
        return Answer("".join(pieces), tuple(pieces), streamed)

    async def main() -> Answer:
        if way == "async":
            response = await engine.achat(message)
            return Answer(response.response, (), response)
        streamed = await engine.astream_chat(message)
        pieces = [piece async for piece in streamed.async_response_gen()]
        if streamed.awrite_response_to_history_task is not None:
            await streamed.awrite_response_to_history_task
        return Answer("".join(pieces), tuple(pieces), streamed)

    answer: Answer = run(main())
    return answer
