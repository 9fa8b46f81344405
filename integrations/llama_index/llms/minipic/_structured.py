"""Answers as objects: decoding is held to their JSON schema."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    MessageRole,
    TextBlock,
)
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.program.utils import process_streaming_objects
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.minipic._prompting import Prompting
from llama_index_instrumentation import get_dispatcher
from pydantic import BaseModel, ValidationError

from minipic_backend import AnswerError

__all__ = ["Structured", "StructuredMiniPIC"]

_INSTRUCTION = "Answer with a JSON object for this schema:\n"

dispatcher = get_dispatcher(__name__)


class StructuredMiniPIC(Prompting, StructuredLLM):
    """A `MiniPIC` whose answers are objects; nodes stay whole."""


class Structured(LLM):
    """Structured predictions. With a `pydantic_program_mode` other than the default,
    LlamaIndex's own."""

    def as_structured_llm(self, output_cls: type[BaseModel], **kwargs: Any) -> StructuredLLM:
        """This model, answering with objects of `output_cls`."""
        return StructuredMiniPIC(llm=self, output_cls=output_cls, **kwargs)

    def structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """An object of `output_cls`, from a template and its arguments.

        Raises:
            AnswerError: the answer is not one, as when `max_tokens` cut it off.
        """
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            return super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        _started(output_cls, prompt, prompt_args)
        messages = _asking_for(output_cls, self._get_messages(prompt, **prompt_args))
        return _parsed(self.chat(messages, **_options(output_cls, llm_kwargs)), output_cls)

    async def astructured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """`structured_predict` for event loops."""
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            return await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        _started(output_cls, prompt, prompt_args)
        messages = _asking_for(output_cls, self._get_messages(prompt, **prompt_args))
        response = await self.achat(messages, **_options(output_cls, llm_kwargs))
        return _parsed(response, output_cls)

    def _structured_stream_call(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            yield from super()._structured_stream_call(
                output_cls, prompt, llm_kwargs, **prompt_args
            )
            return
        messages = _asking_for(output_cls, self._get_messages(prompt, **prompt_args))
        so_far: list[Any] | None = None
        for response in self.stream_chat(messages, **_options(output_cls, llm_kwargs)):
            so_far = [process_streaming_objects(response, output_cls, cur_objects=so_far)]
            yield so_far[0]

    async def _structured_astream_call(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            return await super()._structured_astream_call(
                output_cls, prompt, llm_kwargs, **prompt_args
            )
        messages = _asking_for(output_cls, self._get_messages(prompt, **prompt_args))
        responses = await self.astream_chat(messages, **_options(output_cls, llm_kwargs))

        async def objects() -> AsyncGenerator[Any, None]:
            so_far: list[Any] | None = None
            async for response in responses:
                so_far = [process_streaming_objects(response, output_cls, cur_objects=so_far)]
                yield so_far[0]

        return objects()


def _asking_for(output_cls: type[BaseModel], messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The schema goes last: whatever precedes it keeps its place in the cache."""
    schema = json.dumps(output_cls.model_json_schema(), ensure_ascii=False)
    block = TextBlock(text=_INSTRUCTION + schema)
    last = messages[-1] if messages else None
    if last is None or last.role != MessageRole.USER:
        return [*messages, ChatMessage(role=MessageRole.USER, blocks=[block])]
    return [*messages[:-1], last.model_copy(update={"blocks": [*last.blocks, block]})]


def _options(output_cls: type[BaseModel], given: dict[str, Any] | None) -> dict[str, Any]:
    constraint = {"structured_outputs": {"json": output_cls.model_json_schema()}}
    return {**(given or {}), **constraint}


def _parsed(response: ChatResponse, output_cls: type[BaseModel]) -> BaseModel:
    text = response.message.content or ""
    try:
        output = output_cls.model_validate_json(text)
    except ValidationError as error:
        cut = response.raw["choices"][0]["finish_reason"] == "length" if response.raw else False
        hint = ": raise max_tokens" if cut else ""
        raise AnswerError(f"The answer is no {output_cls.__name__}{hint}. {error}") from error
    dispatcher.event(LLMStructuredPredictEndEvent(output=output))
    return output


def _started(
    output_cls: type[BaseModel], prompt: BasePromptTemplate, arguments: dict[str, Any]
) -> None:
    dispatcher.event(
        LLMStructuredPredictStartEvent(
            output_cls=output_cls, template=prompt, template_args=arguments
        )
    )
