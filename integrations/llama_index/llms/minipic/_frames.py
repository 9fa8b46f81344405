"""The prompts that nodes will stand in, from whatever a user has at hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.mixin import PromptMixin
from llama_index.llms.minipic._messages import to_prompt, unmarked_parts
from llama_index.llms.minipic._nodes import NodeText
from llama_index.llms.minipic._packing import PackedNodes

from minipic_backend import Prompt, PromptError

__all__ = ["Framed", "frame_of"]

Framed = (
    PromptMixin
    | BaseChatEngine
    | BasePromptTemplate
    | Prompt
    | ChatMessage
    | str
    | Sequence[Any]
    | None
)

# What synthesizers ask first; what they refine with stands behind another prefix.
_FIRST_PROMPTS = ("text_qa_template", "summary_template")
_ENGINE_TEMPLATES = ("_context_template", "_context_prompt_template")


def frame_of(prompt: Framed, llm: LLM) -> list[Prompt]:
    """Prompts with a span where nodes will stand, each prefix once.

    Raises:
        PromptError: something that has no place for nodes.
    """
    given = DEFAULT_TEXT_QA_PROMPT_SEL if prompt is None else prompt
    frames = list(_frames(given, llm))
    for frame in frames:
        if not frame.spans:
            raise PromptError(
                "A prompt to warm nodes for has a place for them: {context_str}, or a span"
            )
    if not frames:
        raise PromptError(f"{type(prompt).__name__} has no prompt with a place for nodes")
    return frames


def _frames(prompt: Any, llm: LLM) -> Iterator[Prompt]:
    if isinstance(prompt, Prompt):
        yield prompt
    elif isinstance(prompt, str):
        yield from _frames(_user_template(prompt), llm)
    elif isinstance(prompt, BasePromptTemplate):
        yield _formatted(prompt, llm)
    elif isinstance(prompt, PromptMixin):
        for name, template in prompt.get_prompts().items():
            if name.rpartition(":")[2] in _FIRST_PROMPTS:
                yield _formatted(template, llm)
    elif isinstance(prompt, BaseChatEngine):
        yield from _frames_of_chat_engine(prompt, llm)
    elif _are_messages(prompt):
        yield _chat(prompt, llm)
    elif isinstance(prompt, Iterable):
        for one in prompt:
            yield from _frames(one, llm)
    else:
        raise PromptError(f"Not a prompt to warm nodes for: {type(prompt).__name__}")


def _frames_of_chat_engine(engine: BaseChatEngine, llm: LLM) -> Iterator[Prompt]:
    templates = [getattr(engine, name) for name in _ENGINE_TEMPLATES if hasattr(engine, name)]
    for template in templates:
        role = llm.metadata.system_role
        system = ChatMessage(role=role, content=template.template)
        yield _formatted(ChatPromptTemplate(message_templates=[system, _QUERY]), llm)
    query_engine = getattr(engine, "_query_engine", None)
    if isinstance(query_engine, PromptMixin):
        yield from _frames(query_engine, llm)


_QUERY = ChatMessage(role=MessageRole.USER, content="{query_str}")


def _user_template(text: str) -> ChatPromptTemplate:
    return ChatPromptTemplate(message_templates=[ChatMessage(content=text)])


def _formatted(template: BasePromptTemplate, llm: LLM) -> Prompt:
    nodes = PackedNodes([NodeText("node")])
    arguments: dict[str, Any] = {"context_str": nodes, "context_msg": nodes, "query_str": "query"}
    if llm.metadata.is_chat_model:
        return _chat(llm._get_messages(template, **arguments), llm)
    return Prompt(unmarked_parts(llm._get_prompt(template, **arguments)))


def _chat(messages: Sequence[ChatMessage], llm: LLM) -> Prompt:
    return to_prompt(messages, template_kwargs=getattr(llm, "chat_template_kwargs", None))


def _are_messages(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(one, ChatMessage) for one in value)
