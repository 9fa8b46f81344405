"""The chat model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any, cast

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
    Callbacks,
)
from langchain_core.language_models.base import LanguageModelInput
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    MessageLikeRepresentation,
    convert_to_messages,
)
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ContextThreadPoolExecutor
from pydantic import Field

from langchain_minipic._base import EngineBacked
from langchain_minipic._concurrency import MAX_THREADS, all_at_once
from langchain_minipic._prompt_messages import canonical_prompt, prompt_messages
from langchain_minipic._requests import ChatRequest, sort_options
from langchain_minipic._results import chat_chunk, chat_result
from langchain_minipic._tool_calling import ToolCalling
from langchain_minipic._tools import tool_dicts
from langchain_minipic.messages import to_prompt
from minipic_backend import ConfigurationError, Prompt
from minipic_backend.engines.turns import take_turn

__all__ = ["ChatMiniPIC"]


class ChatMiniPIC(EngineBacked, ToolCalling):
    """A chat model on vLLM that reuses the KV cache of documents wherever they stand.

        llm = ChatMiniPIC(model="HuggingFaceTB/SmolLM2-135M-Instruct")
        chain = {"context": retriever, "question": RunnablePassthrough()} | prompt | llm
        chain.invoke("…").usage_metadata["input_token_details"]

    `prompt` is a `SpanPromptTemplate`, or any that yields marked text blocks (`span_block`).
    What concerns layout, sampling, chat template and parsers may be given per call, too:
    `llm.bind(technique="full")`.
    """

    streaming: bool = False
    """Whether `invoke` streams behind the scenes, so that callbacks see every token."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the model's chat template, such as `enable_thinking`."""

    tool_parser: str | None = None
    """How the model writes tool calls: a name that `vllm serve --tool-call-parser` knows. None
    tells it from the chat template."""

    reasoning_parser: str | None = None
    """What stands around its reasoning: "think", "seed_oss" or "mistral". None tells it from the
    chat template."""

    @property
    def _llm_type(self) -> str:
        return "minipic-chat"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        chat = ("chat_template_kwargs", "tool_parser", "reasoning_parser")
        given = {name: value for name in chat if (value := getattr(self, name))}
        return {**super()._identifying_params, **given}

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request = self._request(messages, stop, kwargs)
        engine = self._get_engine()
        planned = request.on(engine)
        with self._deadline(engine, planned.options) as given:
            result = engine.generate(planned.prompt, **given)
        return chat_result(result, self.model, planned.plan)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request = self._request(messages, stop, kwargs)
        engine = await self._aget_engine()
        planned = request.on(engine)
        with self._deadline(engine, planned.options) as given:
            result = await engine.agenerate(planned.prompt, **given)
        await take_turn()
        return chat_result(result, self.model, planned.plan)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        request = self._request(messages, stop, kwargs, streams=True)
        engine = self._get_engine()
        planned = request.on(engine)
        parser = planned.plan.parser()
        with (
            self._deadline(engine, planned.options) as given,
            closing(cast("Any", engine.stream(planned.prompt, **given))) as pieces,
        ):
            for piece in pieces:
                if (chunk := chat_chunk(piece, parser, self.model)) is None:
                    continue
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        await take_turn()
        request = self._request(messages, stop, kwargs, streams=True)
        engine = await self._aget_engine()
        planned = request.on(engine)
        parser = planned.plan.parser()
        with self._deadline(engine, planned.options) as given:
            async with aclosing(cast("Any", engine.astream(planned.prompt, **given))) as pieces:
                async for piece in pieces:
                    if (chunk := chat_chunk(piece, parser, self.model)) is None:
                        continue
                    if run_manager:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """As LangChain's; many at once leave the event loop time for others."""
        await take_turn()
        return await super().ainvoke(input, config, stop=stop, **kwargs)

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """All at once, unless `max_concurrency` says otherwise: the engine batches them."""
        configs = all_at_once(config, len(inputs))
        return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    def batch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """`batch`, giving each answer as it comes."""
        configs = all_at_once(config, len(inputs))
        return super().batch_as_completed(inputs, configs, **kwargs)

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """As LangChain's, with several prompts answered at once instead of in turn."""
        if len(messages) < 2:
            return super().generate(messages, stop, callbacks, **kwargs)
        run_ids = [kwargs.pop("run_id", None)] + [None] * (len(messages) - 1)
        one = super().generate
        with ContextThreadPoolExecutor(min(len(messages), MAX_THREADS)) as pool:
            results = list(
                pool.map(
                    lambda prompt, run_id: one([prompt], stop, callbacks, run_id=run_id, **kwargs),
                    messages,
                    run_ids,
                )
            )
        return LLMResult(
            generations=[result.generations[0] for result in results],
            llm_output=results[0].llm_output,
            run=[info for result in results for info in result.run or []] or None,
        )

    def _request(
        self,
        messages: Sequence[BaseMessage],
        stop: list[str] | None,
        kwargs: dict[str, Any],
        *,
        streams: bool = False,
    ) -> ChatRequest:
        template = {**self.chat_template_kwargs, **kwargs.pop("chat_template_kwargs", {})}
        tool_parser = kwargs.pop("tool_parser", self.tool_parser)
        reasoning_parser = kwargs.pop("reasoning_parser", self.reasoning_parser)
        given, tools = sort_options(kwargs)
        options = self._call_options(stop, given)
        if streams and (options.get("n") or 1) > 1:
            raise ConfigurationError(f"n={options['n']}: LangChain streams one answer at a time")
        return ChatRequest(messages, options, template, tools, tool_parser, reasoning_parser)

    def get_num_tokens_from_messages(
        self, messages: Sequence[MessageLikeRepresentation], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of a chat as the model sees it, by its own template, documents as plain text."""
        if not messages:
            return 0
        given = tool_dicts(tools or ())
        chat = convert_to_messages(messages)
        prompt = to_prompt(chat, tools=given, template_kwargs=self.chat_template_kwargs)
        return len(self._get_engine().explain(prompt, technique="full").token_ids)

    def _resolve_model_profile(self) -> ModelProfile:
        profile = ModelProfile(
            name=self.model,
            text_inputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            pdf_inputs=False,
            text_outputs=True,
            tool_calling=True,
            tool_choice=True,
        )
        if (tokens := self._context_window()) is not None:
            profile["max_input_tokens"] = tokens
        return profile

    def _convert_input(self, model_input: LanguageModelInput | Prompt) -> PromptValue:
        if isinstance(model_input, Prompt):
            return ChatPromptValue(messages=prompt_messages(model_input))
        return super()._convert_input(model_input)

    def _to_prompt(self, value: Any) -> Prompt:
        if isinstance(value, Prompt):
            return canonical_prompt(value, template_kwargs=self.chat_template_kwargs)
        messages = self._convert_input(value).to_messages()
        return to_prompt(messages, template_kwargs=self.chat_template_kwargs)
