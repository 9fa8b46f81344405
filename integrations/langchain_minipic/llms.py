"""The text model: a prompt goes to the model as it stands, without a chat template."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from typing import Any, Self, cast

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    CallbackManagerForLLMRun,
    Callbacks,
)
from langchain_core.language_models.base import LanguageModelInput
from langchain_core.language_models.llms import BaseLLM
from langchain_core.messages import BaseMessage, HumanMessage, get_buffer_string
from langchain_core.outputs import GenerationChunk, LLMResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableConfig
from pydantic import ConfigDict, PrivateAttr

from langchain_minipic._base import EngineBacked
from langchain_minipic._concurrency import MAX_THREADS, all_at_once
from langchain_minipic._marks import is_marked
from langchain_minipic._prompt_messages import canonical_prompt
from langchain_minipic._results import llm_result, text_chunk
from langchain_minipic._slots import Slots
from langchain_minipic.messages import block_parts, has_spans, join_texts, marked_parts
from minipic_backend import ConfigurationError, Prompt, PromptError, Result, Text
from minipic_backend.engines.turns import take_turn
from minipic_backend.prompt import Part
from minipic_backend.prompt_cache import SchemaPrompt
from minipic_backend.prompt_cache.json_form import prompt_to_json

__all__ = ["MiniPIC"]


class MiniPIC(EngineBacked, BaseLLM):
    """A text model on vLLM that reuses the KV cache of documents wherever they stand.

    For instruct models take `ChatMiniPIC`, which applies their chat template. Messages read as
    LangChain prints them ("Human: …"); marked blocks in them stay spans.
    """

    _spans: str | None = PrivateAttr(default=None)
    """What the prompts of a call are beside their text, for the key of LangChain's caches."""

    @property
    def _llm_type(self) -> str:
        return "minipic"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        spans = {} if self._spans is None else {"spans": self._spans}
        return {**super()._identifying_params, **spans}

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        options = self._call_options(stop, kwargs)
        engine = self._get_engine()
        given = [_raw_prompt(prompt) for prompt in prompts]
        if self.timeout is None:
            return llm_result(engine.generate(given, **options), self.model)

        def one(prompt: Prompt) -> Result:
            with self._deadline(engine, options) as timed:
                return engine.generate(prompt, **timed)

        with ThreadPoolExecutor(min(len(given), MAX_THREADS)) as pool:
            return llm_result(list(pool.map(one, given)), self.model)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        options = self._call_options(stop, kwargs)
        engine = await self._aget_engine()

        async def one(prompt: str) -> Result:
            with self._deadline(engine, options) as timed:
                return await engine.agenerate(_raw_prompt(prompt), **timed)

        results = await asyncio.gather(*map(one, prompts))
        await take_turn()
        return llm_result(results, self.model)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        options = self._stream_options(stop, kwargs)
        engine = self._get_engine()
        with (
            self._deadline(engine, options) as given,
            closing(cast("Any", engine.stream(_raw_prompt(prompt), **given))) as pieces,
        ):
            for piece in pieces:
                chunk = text_chunk(piece, self.model)
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        options = self._stream_options(stop, kwargs)
        engine = await self._aget_engine()
        with self._deadline(engine, options) as given:
            stream = cast("Any", engine.astream(_raw_prompt(prompt), **given))
            async with aclosing(stream) as pieces:
                async for piece in pieces:
                    chunk = text_chunk(piece, self.model)
                    if run_manager:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def _stream_options(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        options = self._call_options(stop, kwargs)
        if (options.get("n") or 1) > 1:
            raise ConfigurationError(f"n={options['n']}: LangChain streams one answer at a time")
        return options

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> str:
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
    ) -> list[str]:
        """All at once, unless `max_concurrency` says otherwise. With `return_exceptions`, a prompt
        that fails leaves the others their answers."""
        if not return_exceptions:
            return super().batch(inputs, config, **kwargs)
        configs = all_at_once(config, len(inputs))
        return Runnable.batch(self, inputs, configs, return_exceptions=True, **kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """As `batch`."""
        if not return_exceptions:
            return await super().abatch(inputs, config, **kwargs)
        return await Runnable.abatch(self, inputs, config, return_exceptions=True, **kwargs)

    def generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        *,
        tags: Any = None,
        metadata: Any = None,
        run_name: Any = None,
        run_id: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        model = self._with(kwargs, prompts)
        return super(MiniPIC, model).generate(
            prompts, stop, callbacks,
            tags=tags, metadata=metadata, run_name=run_name, run_id=run_id,
        )  # fmt: skip

    async def agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        *,
        tags: Any = None,
        metadata: Any = None,
        run_name: Any = None,
        run_id: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        model = self._with(kwargs, prompts)
        return await super(MiniPIC, model).agenerate(
            prompts, stop, callbacks,
            tags=tags, metadata=metadata, run_name=run_name, run_id=run_id,
        )  # fmt: skip

    def _with(self, options: Mapping[str, Any], prompts: Sequence[str]) -> Self:
        """This model with a call's options as its own: `BaseLLM` keys its cache by these, and by
        the prompts' text, which says nothing of spans."""
        spans = _fingerprint(prompts)
        if not options and spans is None:
            return self
        self._call_options(None, options)
        fields = {name: value for name, value in options.items() if name in type(self).model_fields}
        others = {name: value for name, value in options.items() if name not in fields}
        copy = self.model_copy(update={**fields, "model_kwargs": {**self.model_kwargs, **others}})
        copy.__dict__.pop("_serialized", None)
        copy._spans = spans
        copy._hold = self._hold  # a call's own `timeout` asks for no other engine
        return copy

    def generate_prompt(
        self,
        prompts: list[PromptValue],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        values = [self._convert_input(prompt) for prompt in prompts]
        return super().generate_prompt(values, stop, callbacks, **kwargs)

    async def agenerate_prompt(
        self,
        prompts: list[PromptValue],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        values = [self._convert_input(prompt) for prompt in prompts]
        return await super().agenerate_prompt(values, stop, callbacks, **kwargs)

    def _convert_input(self, model_input: LanguageModelInput | Prompt) -> PromptValue:
        if isinstance(model_input, Prompt):
            return _RawPromptValue(prompt=canonical_prompt(model_input))
        value = super()._convert_input(model_input)
        if isinstance(value, _SpanPromptValue | _RawPromptValue):
            return value
        messages = value.to_messages()
        if not any(has_spans(message) for message in messages):
            return value
        return _SpanPromptValue(messages=messages)

    def _to_prompt(self, value: Any) -> Prompt:
        return _raw_prompt(self._convert_input(value).to_string())


class _SpanText(str):
    """A prompt's text that still knows which parts of it are spans.

    `BaseLLM` reduces every prompt to a str and hands that on untouched.
    """

    prompt: Prompt

    def __new__(cls, prompt: Prompt) -> Self:
        self = super().__new__(cls, "".join(part.text for part in prompt.parts))
        self.prompt = prompt
        return self


class _SpanPromptValue(PromptValue):
    messages: list[BaseMessage]

    def to_messages(self) -> list[BaseMessage]:
        return self.messages

    def to_string(self) -> str:
        slots: Slots[list[Part]] = Slots()
        text = get_buffer_string([_with_slots(message, slots.add) for message in self.messages])
        pieces = slots.split(text)
        parts = [[Text(piece)] if isinstance(piece, str) else piece for piece in pieces]
        return _SpanText(Prompt(join_texts(part for group in parts for part in group)))


class _RawPromptValue(PromptValue):
    """A `minipic_backend.Prompt`, whole."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    prompt: Prompt

    def to_messages(self) -> list[BaseMessage]:
        return [HumanMessage(self.to_string())]

    def to_string(self) -> str:
        if self.prompt.is_chat:
            raise PromptError("A chat is for a chat model (ChatMiniPIC): this one takes raw text")
        return _SpanText(self.prompt)


def _fingerprint(prompts: Sequence[str]) -> str | None:
    """Of the spans of prompts; None where there are none."""
    known = [
        (
            one.prompt.parts,
            prompt_to_json(one.prompt) if isinstance(one.prompt, SchemaPrompt) else 0,
        )
        for one in prompts
        if isinstance(one, _SpanText)
    ]
    return hashlib.sha256(repr(known).encode()).hexdigest() if known else None


def _with_slots(message: BaseMessage, add: Callable[[list[Part]], str]) -> BaseMessage:
    if isinstance(message.content, str):
        return message
    content = [
        {"type": "text", "text": add(block_parts(block))}
        if isinstance(block, dict) and block.get("type") == "text"
        else block
        for block in message.content
    ]
    return message.model_copy(update={"content": content})


def _raw_prompt(text: str) -> Prompt:
    if isinstance(text, _SpanText):
        return text.prompt
    return Prompt(marked_parts(text) if is_marked(text) else text)
