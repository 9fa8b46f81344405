"""The model."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AbstractContextManager, aclosing, closing
from typing import Any, cast

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.llms.minipic._calling import Calling
from llama_index.llms.minipic._engine import EngineBacked
from llama_index.llms.minipic._messages import unmarked_parts
from llama_index.llms.minipic._metadata import EngineMetadata
from llama_index.llms.minipic._prompting import Prompting
from llama_index.llms.minipic._records import CallLog, CallRecord
from llama_index.llms.minipic._requests import TOOL_OPTIONS, ChatRequest, PlannedRequest
from llama_index.llms.minipic._results import Streamed, as_completion, chat_response, record_of
from llama_index.llms.minipic._spans import SpanMethods
from llama_index.llms.minipic._structured import Structured
from llama_index.llms.minipic.prompt_helper import SpanChatPromptHelper, SpanPromptHelper
from pydantic import PrivateAttr

from minipic_backend import ConfigurationError, EngineProtocol, Prompt
from minipic_backend.deadline import deadline
from minipic_backend.tools import plan_answer

__all__ = ["MiniPIC"]

_Planner = Callable[[EngineProtocol], PlannedRequest]


class MiniPIC(SpanMethods, EngineBacked, Prompting, Structured, Calling):
    """A model on vLLM that reuses the KV cache of nodes wherever they stand.

        llm = install(Settings, MiniPIC(model="HuggingFaceTB/SmolLM2-135M-Instruct"))
        engine = index.as_query_engine(similarity_top_k=8)
        with llm.record() as calls:
            engine.query("…")
        calls[0].usage.cached_tokens

    Every option may also be given per call: `llm.chat(messages, technique="full")`.

    Args:
        context_window: tokens of the context, where fewer are to be used than the engine has.
        is_chat_model: False for a model without chat template: it gets prompts as they stand.
        is_function_calling_model: False has agents ask for tools in their own words.
        chat_template_kwargs: variables for the chat template, such as `enable_thinking`.
        tool_parser: how the model writes tool calls: a name that `vllm serve --tool-call-parser`
            knows. None tells it from the chat template.
        reasoning_parser: the like for reasoning.
        trim_history: leave out the oldest turns of a chat that is too long, instead of refusing
            it.
    """

    context_window: int | None = None
    is_function_calling_model: bool = True
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    trim_history: bool = True

    _log: CallLog = PrivateAttr(default_factory=CallLog)

    @classmethod
    def class_name(cls) -> str:
        return "MiniPIC"

    @property
    def metadata(self) -> LLMMetadata:
        """What the model can do. The engine starts when its context window is first read."""
        return EngineMetadata.of(
            self._find_window,
            num_output=self._num_output({}),
            is_chat_model=self.is_chat_model,
            is_function_calling_model=self.is_chat_model and self.is_function_calling_model,
            model_name=self.model or self.base_url,
        )

    def to_payload(self) -> dict[str, Any]:
        """For observability: what was configured, without secrets, and without an engine."""
        return {
            "class_name": self.class_name(),
            "model": self.model,
            "base_url": self.base_url,
            **self._own_options(),
        }

    # ---- packing nodes ----------------------------------------------------------------------

    @property
    def prompt_helper(self) -> SpanPromptHelper:
        """Packs whole nodes into prompts: for `Settings.prompt_helper`, or as the `prompt_helper`
        of a response synthesizer. Starts the engine, which knows the context's size."""
        return SpanPromptHelper(self)

    @property
    def chat_prompt_helper(self) -> SpanChatPromptHelper:
        """`prompt_helper`, for synthesizers with `multimodal=True`."""
        return SpanChatPromptHelper(self)

    # ---- what calls cost --------------------------------------------------------------------

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

    # ---- chat -------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answers a chat.

        Raises:
            PromptError: messages that cannot be sent, or are too long.
            ConfigurationError: an unknown option.
            TimeoutError: no answer within `timeout` seconds.
        """
        return self._answer(self._chat(messages, kwargs))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat` for event loops; cancelling it aborts the request."""
        return await self._aanswer(self._chat(messages, kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """`chat`, piece by piece; closing the generator aborts the request."""
        return self._stream(self._chat(messages, kwargs, streams=True))

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """`stream_chat` for event loops."""
        return self._astream(self._chat(messages, kwargs, streams=True))

    # ---- completions ------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answers a text: as a user's message where the model is one for chats, and as it stands
        where it is not, or where `formatted` says that it has everything already."""
        return as_completion(self._answer(self._complete(prompt, formatted, kwargs)))

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """`complete` for event loops; cancelling it aborts the request."""
        return as_completion(await self._aanswer(self._complete(prompt, formatted, kwargs)))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """`complete`, piece by piece; closing the generator aborts the request."""
        planner = self._complete(prompt, formatted, kwargs, streams=True)

        def pieces() -> CompletionResponseGen:
            with closing(self._stream(planner)) as responses:
                for response in responses:
                    yield as_completion(response)

        return pieces()

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """`stream_complete` for event loops."""
        planner = self._complete(prompt, formatted, kwargs, streams=True)

        async def pieces() -> CompletionResponseAsyncGen:
            async with aclosing(self._astream(planner)) as responses:
                async for response in responses:
                    yield as_completion(response)

        return pieces()

    # ---- inside -----------------------------------------------------------------------------

    def _chat(
        self, messages: Sequence[ChatMessage], kwargs: dict[str, Any], *, streams: bool = False
    ) -> _Planner:
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
        )
        return request.on

    def _complete(
        self, prompt: str, formatted: bool, kwargs: dict[str, Any], *, streams: bool = False
    ) -> _Planner:
        if self.is_chat_model and not formatted:
            message = ChatMessage(role=MessageRole.USER, content=prompt)
            return self._chat([message], kwargs, streams=streams)
        options = self._checked_options(kwargs, streams)
        parts = unmarked_parts(prompt)
        request = PlannedRequest("complete", Prompt(parts), options, plan_answer(None))
        return lambda engine: request

    def _checked_options(self, given: dict[str, Any], streams: bool) -> dict[str, Any]:
        options = self._call_options(given)
        if streams and (options.get("n") or 1) > 1:
            raise ConfigurationError(f"n={options['n']}: LlamaIndex streams one answer at a time")
        return options

    def _answer(self, planner: _Planner) -> ChatResponse:
        engine = self._get_engine()
        request = planner(engine)
        with deadline(engine, request.options, self.timeout) as options:
            result = engine.generate(request.prompt, **options)
        self._note(request, result)
        return chat_response(result, request, self.model)

    async def _aanswer(self, planner: _Planner) -> ChatResponse:
        engine = await self._aget_engine()
        request = await asyncio.to_thread(planner, engine)
        with deadline(engine, request.options, self.timeout) as options:
            result = await engine.agenerate(request.prompt, **options)
        self._note(request, result)
        return chat_response(result, request, self.model)

    def _stream(self, planner: _Planner) -> Generator[ChatResponse, None, None]:
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

    async def _astream(self, planner: _Planner) -> AsyncGenerator[ChatResponse, None]:
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

    def _find_window(self) -> int:
        return self.context_window or self._get_engine().max_model_len

    def _num_output(self, options: dict[str, Any]) -> int:
        """Tokens that an answer is expected to have at most."""
        return options.get("max_tokens") or self.max_tokens or DEFAULT_NUM_OUTPUTS
