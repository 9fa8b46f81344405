"""What a caller hands over: text, and documents that are to become spans.

Both integrations end here. No tokens yet: those are the layout's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minipic_backend.errors import PromptError, shown

__all__ = ["Message", "Part", "Prompt", "Span", "Text"]


@dataclass(frozen=True, slots=True)
class Text:
    """Ordinary text: instructions, a question, an answer of an earlier turn."""

    text: str

    def __post_init__(self) -> None:
        _check_str(self.text, "Text")


@dataclass(frozen=True, slots=True)
class Span:
    """A document (or any independent part) whose KV cache is reused wherever it appears.

    Args:
        text: the document.
        rank: its place in the caller's order of relevance, 0 the best; None where the caller
            has no such order. Ranked spans may be put in that order, the best one last, and only
            they can become late documents.
        id: the caller's own name for it, shown by `explain`.
    """

    text: str
    rank: int | None = None
    id: str | None = None

    def __post_init__(self) -> None:
        _check_str(self.text, "Span")
        if self.rank is not None and (not isinstance(self.rank, int) or self.rank < 0):
            raise PromptError(f"Span.rank must be a whole number from 0, not {shown(self.rank)}")


Part = Text | Span


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message.

    Args:
        role: "system", "user", "assistant", "tool", or whatever the chat template knows.
        parts: its content in order; a plain string is one `Text`.
        extra: further keys of the message for the chat template, such as `tool_calls`.
    """

    role: str
    parts: tuple[Part, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __init__(
        self, role: str, parts: str | Part | Iterable[Part], extra: Mapping[str, Any] | None = None
    ) -> None:
        object.__setattr__(self, "role", role)
        object.__setattr__(self, "parts", _as_parts(parts))
        object.__setattr__(self, "extra", dict(extra or {}))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt made of text and spans: raw (`Prompt([...])`) or a chat (`Prompt.chat([...])`).

    A raw prompt goes to the model as it stands. A chat is rendered by the model's own chat
    template, which must be there.
    """

    parts: tuple[Part, ...] = ()
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True

    def __init__(
        self,
        parts: str | Part | Iterable[Part] = (),
        *,
        messages: Sequence[Message] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> None:
        object.__setattr__(self, "parts", _as_parts(parts))
        object.__setattr__(self, "messages", _as_messages(messages))
        object.__setattr__(self, "tools", tuple(tools))
        object.__setattr__(self, "template_kwargs", dict(template_kwargs or {}))
        object.__setattr__(self, "add_generation_prompt", add_generation_prompt)
        if bool(self.parts) == bool(self.messages):
            raise PromptError(
                "A Prompt is either raw, Prompt([Text(...), Span(...)]), or a chat, "
                "Prompt.chat([Message(...)]): "
                + ("it has both" if self.parts else "it has no content")
            )

    @classmethod
    def chat(
        cls,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """A chat: `Prompt.chat([Message("user", [Span(doc), Text("question")])])`."""
        return cls(
            messages=messages,
            tools=tools,
            template_kwargs=template_kwargs,
            add_generation_prompt=add_generation_prompt,
        )

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Every span, in order."""
        holders = [message.parts for message in self.messages] or [self.parts]
        return tuple(part for parts in holders for part in parts if isinstance(part, Span))


def _as_parts(parts: str | Part | Iterable[Part]) -> tuple[Part, ...]:
    if isinstance(parts, str):
        return (Text(parts),)
    if isinstance(parts, Text | Span):
        return (parts,)
    if not isinstance(parts, Iterable) or isinstance(parts, Mapping):
        raise PromptError(
            f"Content is a str, a Text, a Span, or a list of them, not {type(parts).__name__}: "
            f"{shown(parts)}"
        )
    result = tuple(Text(part) if isinstance(part, str) else part for part in parts)
    for part in result:
        if not isinstance(part, Text | Span):
            raise PromptError(
                f"A prompt holds Text and Span, not {type(part).__name__}: {shown(part)}"
            )
    return result


def _as_messages(messages: Iterable[Message]) -> tuple[Message, ...]:
    if isinstance(messages, Message | str | Mapping) or not isinstance(messages, Iterable):
        raise PromptError(f"A chat is a list of Message, not {shown(messages)}")
    result = tuple(messages)
    for message in result:
        if not isinstance(message, Message):
            raise PromptError(
                'A chat holds Message("user", [Span(document), Text("question")]), not '
                f"{type(message).__name__}: {shown(message)}"
            )
    return result


def _check_str(value: object, owner: str) -> None:
    if not isinstance(value, str):
        raise PromptError(f"{owner} takes a str, not {type(value).__name__}: {shown(value)}")
