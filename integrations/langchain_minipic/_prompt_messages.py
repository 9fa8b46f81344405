"""A `minipic_backend.Prompt` as LangChain's messages, and a schema's prompt found again in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage

from minipic_backend import Message, Prompt, PromptError, Span, Text
from minipic_backend.chat import document_parts, join_texts, merge_messages
from minipic_backend.errors import shown
from minipic_backend.prompt import Part
from minipic_backend.prompt_cache import SchemaPrompt
from minipic_backend.prompt_cache.json_form import prompt_from_json, prompt_to_json

__all__ = [
    "MARK",
    "ROLES",
    "canonical_prompt",
    "find_schema_prompt",
    "prompt_messages",
    "span_block",
    "with_stand_ins",
]

MARK = "minipic"

ROLES = {"human": "user", "ai": "assistant"}
"""LangChain's names of roles, in those of chat templates."""

_KINDS: dict[str, type[BaseMessage]] = {
    "system": SystemMessage,
    "user": HumanMessage,
    "assistant": AIMessage,
}


def span_block(text: str, *, rank: int | None = None, id: str | None = None) -> dict[str, Any]:
    """A text block marked as a span; to every other chat model it is plain text.

    Args:
        text: the document; blank lines around it do not count as part of the span.
        rank: its place in an order of relevance, 0 the best; None where there is no order.
        id: a name for `explain`.
    """
    mark: dict[str, Any] = {"span": True}
    if rank is not None:
        mark["rank"] = rank
    if id is not None:
        mark["id"] = id
    return {"type": "text", "text": text, "extras": {MARK: mark}}


def canonical_prompt(prompt: Prompt, *, template_kwargs: Mapping[str, Any] | None = None) -> Prompt:
    """The prompt as a model of LangChain's serves it, and so warms, explains and compares it.

    As with messages, white space around a span is text beside it, a span of nothing else is none,
    and neighbouring messages of one role are one. A schema's prompt stays as it is.

    Args:
        prompt: raw or a chat.
        template_kwargs: the model's own variables for the chat template; the prompt's go first.
    """
    if not prompt.is_chat:
        is_schema = isinstance(prompt, SchemaPrompt)
        return prompt if is_schema else Prompt(_canonical(prompt.parts) or prompt.parts)
    variables = {**(template_kwargs or {}), **prompt.template_kwargs}
    if isinstance(prompt, SchemaPrompt):
        return prompt.with_chat_options(prompt.tools, variables)
    messages = [
        Message(ROLES.get(message.role, message.role), _canonical(message.parts), message.extra)
        for message in prompt.messages
    ]
    return Prompt.chat(
        merge_messages(messages),
        tools=prompt.tools,
        template_kwargs=variables,
        add_generation_prompt=prompt.add_generation_prompt,
    )


def with_stand_ins(prompt: Prompt) -> Prompt:
    """The prompt, whose spans get a text where all are blank: they only say where documents go."""
    if isinstance(prompt, SchemaPrompt) or any(span.text.strip() for span in prompt.spans):
        return prompt
    messages = [Message(one.role, _filled(one.parts), one.extra) for one in prompt.messages]
    return replace(prompt, parts=tuple(_filled(prompt.parts)), messages=tuple(messages))


def prompt_messages(prompt: Prompt) -> list[BaseMessage]:
    """A chat; `to_prompt` makes `canonical_prompt(prompt)` of it.

    Raises:
        PromptError: a raw prompt, or one with what only a call or a message of LangChain's can say.
    """
    if not prompt.is_chat:
        raise PromptError(
            "A raw Prompt is for a text model (MiniPIC): a chat model takes Prompt.chat(...)"
        )
    if prompt.tools or prompt.template_kwargs or not prompt.add_generation_prompt:
        raise PromptError(
            "Tools and variables of the chat template are options of the model here: "
            "bind_tools(...), chat_template_kwargs=..."
        )
    messages = [_message(message) for message in prompt.messages]
    if isinstance(prompt, SchemaPrompt):
        *modules, question = [_block(part) for part in prompt.messages[-1].parts]
        mark = {"span": False, "schema": prompt_to_json(prompt)}
        messages[-1] = HumanMessage([*modules, {**question, "extras": {MARK: mark}}])
    return messages


def find_schema_prompt(messages: Sequence[BaseMessage]) -> SchemaPrompt | None:
    """The schema's prompt that `prompt_messages` made these messages of, if nothing was added."""
    content: Any = messages[-1].content
    last = content[-1] if isinstance(content, list) and content else None
    extras = last.get("extras") if isinstance(last, Mapping) else None
    mark = extras.get(MARK) if isinstance(extras, Mapping) else None
    if not isinstance(mark, Mapping) or "schema" not in mark:
        return None
    prompt = prompt_from_json(mark["schema"])
    texts = ["".join(part.text for part in message.parts) for message in prompt.messages]
    return prompt if texts == [str(message.text) for message in messages] else None


def _message(message: Message) -> BaseMessage:
    if message.extra:
        raise PromptError(
            f"A {shown(message.role)} message with {', '.join(sorted(message.extra))}: "
            "give LangChain's own messages instead of a Prompt"
        )
    content: Any = [_block(part) for part in message.parts]
    if len(content) == 1 and "extras" not in content[0]:
        content = content[0]["text"]
    kind = _KINDS.get(message.role)
    if kind is None:
        return ChatMessage(content=content, role=message.role)
    return kind(content)


def _block(part: Part) -> dict[str, Any]:
    if isinstance(part, Span):
        return span_block(part.text, rank=part.rank, id=part.id)
    return {"type": "text", "text": part.text}


def _canonical(parts: Iterable[Part]) -> list[Part]:
    """Parts of the same text whose spans are what `warm` computes."""
    apart = [
        [part] if isinstance(part, Text) else document_parts(part.text, rank=part.rank, id=part.id)
        for part in parts
    ]
    return join_texts(one for group in apart for one in group)


def _filled(parts: Iterable[Part]) -> list[Part]:
    return [
        replace(part, text="document") if isinstance(part, Span) and not part.text.strip() else part
        for part in parts
    ]
