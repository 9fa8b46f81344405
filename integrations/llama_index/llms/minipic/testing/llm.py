"""The model itself."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from typing import Any, ClassVar

import pytest
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    TextBlock,
)
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.llms import LLM
from llama_index.llms.minipic.testing.prompts_seen import PromptsSeen

__all__ = ["LLMTests"]

PROMPT = "Name three colours of the rainbow."
MESSAGES = [ChatMessage(role="system", content="Be brief."), ChatMessage(content=PROMPT)]


class LLMTests:
    """Subclass it and give it an `llm` fixture.

    Attributes:
        has_usage: `raw["usage"]` counts tokens.
        max_gap_s: the longest that an async call may hold up its event loop.
    """

    has_usage: ClassVar[bool] = True
    max_gap_s: ClassVar[float] = 0.5

    @pytest.fixture
    def llm(self) -> LLM:
        raise NotImplementedError("Give the model under test as a fixture `llm`")

    def test_metadata(self, llm: LLM) -> None:
        metadata = llm.metadata
        assert metadata.context_window > 0
        assert metadata.model_name not in ("", "unknown")
        assert metadata.model_dump()["context_window"] == metadata.context_window

    def test_complete(self, llm: LLM) -> None:
        response = llm.complete(PROMPT)
        assert isinstance(response, CompletionResponse)
        assert response.text.strip()
        assert asyncio.run(llm.acomplete(PROMPT)).text.strip()

    def test_chat(self, llm: LLM) -> None:
        for response in (llm.chat(MESSAGES), asyncio.run(llm.achat(MESSAGES))):
            assert isinstance(response, ChatResponse)
            assert response.message.role == "assistant"
            assert (response.message.content or "").strip()

    def test_streams_accumulate(self, llm: LLM) -> None:
        """Each response has all the text so far, and what is new as `delta`."""
        for completions in (list(llm.stream_complete(PROMPT)), self.astream_complete(llm)):
            _check_stream([one.text for one in completions], [one.delta for one in completions])
        for chats in (list(llm.stream_chat(MESSAGES)), self.astream_chat(llm)):
            texts = [one.message.content or "" for one in chats]
            _check_stream(texts, [one.delta for one in chats])

    def test_usage(self, llm: LLM) -> None:
        if not self.has_usage:
            pytest.skip("has_usage is False")
        last = [
            llm.chat(MESSAGES),
            list(llm.stream_chat(MESSAGES))[-1],
            llm.complete(PROMPT),
            list(llm.stream_complete(PROMPT))[-1],
        ]
        for response in last:
            usage = response.raw["usage"]  # type: ignore[attr-defined]
            assert usage["prompt_tokens"] > 0
            assert usage["completion_tokens"] > 0

    def test_token_counting_handler(self, llm: LLM) -> None:
        if not self.has_usage:
            pytest.skip("has_usage is False")
        counter = TokenCountingHandler(tokenizer=str.split)
        before, llm.callback_manager = llm.callback_manager, CallbackManager([counter])
        try:
            usage = llm.chat(MESSAGES).raw["usage"]  # type: ignore[index]
        finally:
            llm.callback_manager = before
        assert counter.prompt_llm_token_count == usage["prompt_tokens"]
        assert counter.completion_llm_token_count == usage["completion_tokens"]

    def test_events(self, llm: LLM) -> None:
        with PromptsSeen() as seen:
            llm.chat(MESSAGES)
            list(llm.stream_complete(PROMPT))
        assert [PROMPT in prompt for prompt in seen.prompts] == [True, True]
        assert len(seen.responses) == 2

    def test_blocks(self, llm: LLM) -> None:
        message = ChatMessage(blocks=[TextBlock(text="One."), TextBlock(text=PROMPT)])
        assert (llm.chat([message]).message.content or "").strip()

    def test_async_leaves_the_event_loop_free(self, llm: LLM) -> None:
        gaps: list[float] = []

        async def beat() -> None:
            while True:
                started = time.perf_counter()
                await asyncio.sleep(0.01)
                gaps.append(time.perf_counter() - started)

        async def main() -> None:
            heart = asyncio.create_task(beat())
            await asyncio.gather(llm.acomplete(PROMPT), llm.achat(MESSAGES))
            async for _ in await llm.astream_chat(MESSAGES):
                pass
            heart.cancel()

        asyncio.run(main())
        assert max(gaps, default=0.0) < self.max_gap_s

    def test_threads_at_once(self, llm: LLM) -> None:
        answers: list[str | None] = []

        def work() -> None:
            answers.append(llm.chat(MESSAGES).message.content)

        threads = [threading.Thread(target=work) for _ in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == 32
        assert all(answers)

    def test_pickle(self, llm: LLM) -> None:
        assert type(pickle.loads(pickle.dumps(llm))) is type(llm)

    @staticmethod
    def astream_complete(llm: LLM) -> list[Any]:
        async def main() -> list[Any]:
            return [response async for response in await llm.astream_complete(PROMPT)]

        return asyncio.run(main())

    @staticmethod
    def astream_chat(llm: LLM) -> list[Any]:
        async def main() -> list[Any]:
            return [response async for response in await llm.astream_chat(MESSAGES)]

        return asyncio.run(main())


def _check_stream(texts: list[str], deltas: list[str | None]) -> None:
    assert len([delta for delta in deltas if delta]) > 1, "came in one piece"
    for place in range(len(texts)):
        assert texts[place] == "".join(delta or "" for delta in deltas[: place + 1])
