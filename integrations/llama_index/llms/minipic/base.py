"""The model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing, closing
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.llms.minipic._calling import Calling
from llama_index.llms.minipic._generating import Generating
from llama_index.llms.minipic._metadata import EngineMetadata
from llama_index.llms.minipic._prompting import Prompting
from llama_index.llms.minipic._results import as_completion
from llama_index.llms.minipic._structured import Structured
from llama_index.llms.minipic.prompt_helper import SpanChatPromptHelper, SpanPromptHelper

__all__ = ["MiniPIC"]


class MiniPIC(Generating, Prompting, Structured, Calling):
    """A model on vLLM that reuses the KV cache of nodes wherever they stand.

        llm = install(Settings, MiniPIC(model="HuggingFaceTB/SmolLM2-135M-Instruct"))
        engine = index.as_query_engine(similarity_top_k=8)
        with llm.record() as calls:
            engine.query("…")
        calls[0].usage.cached_tokens

    What concerns layout and sampling may be given per call, too:
    `llm.chat(messages, technique="full")`.

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

    is_function_calling_model: bool = True

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

    # ---- chat -------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answers a chat.

        Raises:
            PromptError: messages that cannot be sent, or are too long.
            ConfigurationError: an unknown option.
            TimeoutError: no answer within `timeout` seconds.
        """
        return self._answer(self._plan_chat(messages, kwargs))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat` for event loops; cancelling it aborts the request."""
        return await self._aanswer(self._plan_chat(messages, kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """`chat`, piece by piece; closing the generator aborts the request."""
        return self._stream(self._plan_chat(messages, kwargs, streams=True))

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """`stream_chat` for event loops."""
        return self._astream(self._plan_chat(messages, kwargs, streams=True))

    # ---- completions ------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answers a text: as a user's message where the model is one for chats, and as it stands
        where it is not, or where `formatted` says that it has everything already."""
        return as_completion(self._answer(self._plan_completion(prompt, formatted, kwargs)))

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """`complete` for event loops; cancelling it aborts the request."""
        return as_completion(await self._aanswer(self._plan_completion(prompt, formatted, kwargs)))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """`complete`, piece by piece; closing the generator aborts the request."""
        planner = self._plan_completion(prompt, formatted, kwargs, streams=True)

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
        planner = self._plan_completion(prompt, formatted, kwargs, streams=True)

        async def pieces() -> CompletionResponseAsyncGen:
            async with aclosing(self._astream(planner)) as responses:
                async for response in responses:
                    yield as_completion(response)

        return pieces()

    def _find_window(self) -> int:
        return self.context_window or self._get_engine().max_model_len
