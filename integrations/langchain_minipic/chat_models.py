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
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ContextThreadPoolExecutor, get_config_list
from pydantic import Field

from langchain_minipic._base import EngineBacked
from langchain_minipic._results import chat_chunk, chat_result
from langchain_minipic.messages import to_prompt
from minipic_backend import ConfigurationError, Prompt

__all__ = ["ChatMiniPIC"]

# Each waits for the engine, which runs them all at once; LangChain's own default is few.
_MAX_THREADS = 256


class ChatMiniPIC(EngineBacked, BaseChatModel):
    """A chat model on vLLM that reuses the KV cache of documents wherever they stand.

        llm = ChatMiniPIC(model="HuggingFaceTB/SmolLM2-135M-Instruct")
        chain = {"context": retriever, "question": RunnablePassthrough()} | prompt | llm
        chain.invoke("…").usage_metadata["input_token_details"]

    `prompt` is a `SpanPromptTemplate`, or any that yields marked text blocks (`span_block`).
    Every option may also be given per call: `llm.bind(technique="full")`.
    """

    streaming: bool = False
    """Whether `invoke` streams behind the scenes, so that callbacks see every token."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the model's chat template, such as `enable_thinking`."""

    @property
    def _llm_type(self) -> str:
        return "minipic-chat"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        template = {"chat_template_kwargs": self.chat_template_kwargs}
        return {**super()._identifying_params, **template}

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        prompt, options = self._request(messages, stop, kwargs)
        engine = self._get_engine()
        with self._deadline(engine, options) as given:
            return chat_result(engine.generate(prompt, **given), self.model)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        prompt, options = self._request(messages, stop, kwargs)
        engine = await self._aget_engine()
        with self._deadline(engine, options) as given:
            return chat_result(await engine.agenerate(prompt, **given), self.model)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        prompt, options = self._request(messages, stop, kwargs, streams=True)
        engine = self._get_engine()
        with (
            self._deadline(engine, options) as given,
            closing(cast("Any", engine.stream(prompt, **given))) as pieces,
        ):
            for piece in pieces:
                chunk = chat_chunk(piece, self.model)
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
        prompt, options = self._request(messages, stop, kwargs, streams=True)
        engine = await self._aget_engine()
        with self._deadline(engine, options) as given:
            async with aclosing(cast("Any", engine.astream(prompt, **given))) as pieces:
                async for piece in pieces:
                    chunk = chat_chunk(piece, self.model)
                    if run_manager:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """All at once, unless `max_concurrency` says otherwise: the engine batches them."""
        configs = _all_at_once(config, len(inputs))
        return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    def batch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """`batch`, giving each answer as it comes."""
        configs = _all_at_once(config, len(inputs))
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
        with ContextThreadPoolExecutor(min(len(messages), _MAX_THREADS)) as pool:
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
    ) -> tuple[Prompt, dict[str, Any]]:
        template = {**self.chat_template_kwargs, **kwargs.pop("chat_template_kwargs", {})}
        options = self._call_options(stop, kwargs)
        if streams and (options.get("n") or 1) > 1:
            raise ConfigurationError(f"n={options['n']}: LangChain streams one answer at a time")
        return to_prompt(messages, template_kwargs=template), options

    def _to_prompt(self, value: Any) -> Prompt:
        if isinstance(value, Prompt):
            return value
        messages = self._convert_input(value).to_messages()
        return to_prompt(messages, template_kwargs=self.chat_template_kwargs)


def _all_at_once(
    config: RunnableConfig | Sequence[RunnableConfig] | None, number: int
) -> list[RunnableConfig]:
    configs = get_config_list(config, number)
    if not configs or configs[0].get("max_concurrency") is not None:
        return configs
    return [{**one, "max_concurrency": min(number, _MAX_THREADS)} for one in configs]
