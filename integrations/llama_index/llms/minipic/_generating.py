"""From a call of the model to the engine and back."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AbstractContextManager, aclosing, closing
from typing import Any, cast

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.llms.minipic._condensing import with_less_history
from llama_index.llms.minipic._messages import unmarked_parts
from llama_index.llms.minipic._records import CallLog, CallRecord
from llama_index.llms.minipic._requests import TOOL_OPTIONS, ChatRequest, PlannedRequest, fits
from llama_index.llms.minipic._results import Streamed, chat_response, record_of
from llama_index.llms.minipic._spans import SpanMethods
from pydantic import PrivateAttr

from minipic_backend import ConfigurationError, EngineProtocol, Prompt, PromptError
from minipic_backend.engines.deadline import deadline
from minipic_backend.errors import shown
from minipic_backend.tools import plan_answer

__all__ = ["Generating", "Planner"]

Planner = Callable[[EngineProtocol], PlannedRequest]


class Generating(SpanMethods):
    """Runs requests, whole or streamed, and keeps their records."""

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    trim_history: bool = True
    context_window: int | None = None

    _log: CallLog = PrivateAttr(default_factory=CallLog)

    @property
    def calls(self) -> deque[CallRecord]:
        """Records of the last thousand calls, the latest last."""
        return self._log.recent

    def record(self) -> AbstractContextManager[list[CallRecord]]:
        """Records of the calls that end within a `with` block, in whatever thread:

        with llm.record() as calls:
            engine.query("…")
        """
        return self._log.recording()

    def _plan_chat(
        self, messages: Sequence[ChatMessage], kwargs: dict[str, Any], *, streams: bool = False
    ) -> Planner:
        given = {
            k: v for k, v in kwargs.items() if k not in (*TOOL_OPTIONS, "chat_template_kwargs")
        }
        options = self._checked_options(given, streams)
        request = ChatRequest(
            list(messages),
            options,
            {**self.chat_template_kwargs, **kwargs.get("chat_template_kwargs", {})},
            {name: value for name, value in kwargs.items() if name in TOOL_OPTIONS},
            self.tool_parser,
            self.reasoning_parser,
            self._num_output(options),
            self.trim_history,
            self.context_window,
        )
        return request.on

    def _plan_completion(
        self, prompt: str, formatted: bool, kwargs: dict[str, Any], *, streams: bool = False
    ) -> Planner:
        if not isinstance(prompt, str):
            raise PromptError(f"complete takes a str, not {type(prompt).__name__}: {shown(prompt)}")
        if self.is_chat_model and not formatted:
            message = ChatMessage(role=MessageRole.USER, content=prompt)
            return self._plan_chat([message], kwargs, streams=streams)
        options = self._checked_options(kwargs, streams)

        def on(engine: EngineProtocol) -> PlannedRequest:
            def has_room(text: str) -> bool:
                whole, num_output = Prompt(unmarked_parts(text)), self._num_output(options)
                return fits(whole, engine, options, num_output, self.context_window)

            text = with_less_history(prompt, has_room) if self.trim_history else prompt
            return PlannedRequest(
                "complete", Prompt(unmarked_parts(text)), options, plan_answer(None)
            )

        return on

    def _checked_options(self, given: dict[str, Any], streams: bool) -> dict[str, Any]:
        options = self._call_options(given)
        if streams and (options.get("n") or 1) > 1:
            raise ConfigurationError(f"n={options['n']}: LlamaIndex streams one answer at a time")
        return options

    def _answer(self, planner: Planner) -> ChatResponse:
        engine = self._get_engine()
        request = planner(engine)
        with deadline(engine, request.options, self.timeout) as options:
            result = engine.generate(request.prompt, **options)
        self._note(request, result)
        return chat_response(result, request, self.model)

    async def _aanswer(self, planner: Planner) -> ChatResponse:
        engine = await self._aget_engine()
        request = await asyncio.to_thread(planner, engine)
        with deadline(engine, request.options, self.timeout) as options:
            result = await engine.agenerate(request.prompt, **options)
        self._note(request, result)
        return chat_response(result, request, self.model)

    def _stream(self, planner: Planner) -> Generator[ChatResponse, None, None]:
        engine = self._get_engine()
        request = planner(engine)
        answer = Streamed(request, self.model)
        with deadline(engine, request.options, self.timeout) as options:
            pieces = cast("Generator[Any, None, None]", engine.stream(request.prompt, **options))
            with closing(pieces):
                for chunk in pieces:
                    self._note(request, chunk)
                    if (response := answer.add(chunk)) is not None:
                        yield response

    async def _astream(self, planner: Planner) -> AsyncGenerator[ChatResponse, None]:
        engine = await self._aget_engine()
        request = await asyncio.to_thread(planner, engine)
        answer = Streamed(request, self.model)
        with deadline(engine, request.options, self.timeout) as options:
            pieces = cast("AsyncGenerator[Any, None]", engine.astream(request.prompt, **options))
            async with aclosing(pieces):
                async for chunk in pieces:
                    self._note(request, chunk)
                    if (response := answer.add(chunk)) is not None:
                        yield response

    def _note(self, request: PlannedRequest, part: Any) -> None:
        if (record := record_of(request, part)) is not None:
            self._log.add(record)

    def _num_output(self, options: dict[str, Any]) -> int:
        """Tokens that an answer is expected to have at most."""
        return options.get("max_tokens") or self.max_tokens or DEFAULT_NUM_OUTPUTS
