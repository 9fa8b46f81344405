"""What every integration does to messages on their way into a `Prompt`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import zip_longest

from minipic_backend.errors import PromptError
from minipic_backend.prompt import Message, Part, Span, Text

__all__ = ["close_texts", "document_core", "document_parts", "join_texts", "merge_messages"]

# A chat template may insist that these alternate; merged, they read the same.
_MERGED_ROLES = {"system", "user"}
_BLANK_LINES = re.compile(r"(?:[^\S\n]*\n)*")


def merge_messages(messages: Iterable[Message]) -> list[Message]:
    """Neighbouring user (and system) messages become one, a blank line between.

    Raises:
        PromptError: no messages.
    """
    result: list[Message] = []
    for message in messages:
        parts = list(message.parts)
        last = result[-1] if result else None
        if (
            last
            and last.role == message.role
            and message.role in _MERGED_ROLES
            and last.extra == message.extra
        ):
            parts = [*last.parts, *([Text("\n\n")] if last.parts and parts else []), *parts]
            result.pop()
        result.append(Message(message.role, join_texts(parts), message.extra))
    if not result:
        raise PromptError("There are no messages to answer")
    return result


def document_parts(text: str, *, rank: int | None = None, id: str | None = None) -> list[Part]:
    """A document as a span, without the white space around it, which stays ordinary text.

    Joined, the texts of the parts are `text`.
    """
    lead, core, trail = _edges(text)
    if not core:
        return [Text(text)]
    span = Span(core, rank=rank, id=id)
    return [*([Text(lead)] if lead else []), span, *([Text(trail)] if trail else [])]


def document_core(text: str) -> str:
    """A document as a span holds it: without blank lines in front and white space behind."""
    return _edges(text)[1]


def join_texts(parts: Iterable[Part]) -> list[Part]:
    """Neighbouring texts made one, empty ones dropped."""
    result: list[Part] = []
    for part in parts:
        if isinstance(part, Text):
            if not part.text:
                continue
            if result and isinstance(result[-1], Text):
                part = Text(result.pop().text + part.text)
        result.append(part)
    return result


def close_texts(parts: Iterable[Part]) -> list[Part]:
    """`join_texts`, where a text in front of a document ends in a blank line, or is left out where
    it is blank: white space there may be a document's own, and must not change what precedes it."""
    joined = join_texts(parts)
    result: list[Part] = []
    for part, behind in zip_longest(joined, joined[1:]):
        if isinstance(part, Text) and isinstance(behind, Span):
            text = part.text.rstrip()
            if not text:
                continue
            part = Text(f"{text}\n\n")
        result.append(part)
    return result


def _edges(text: str) -> tuple[str, str, str]:
    """Blank lines, document, white space: so that a span never depends on its neighbours."""
    core = text.rstrip()
    match = _BLANK_LINES.match(core)
    start = match.end() if match else 0
    return core[:start], core[start:], text[len(core) :]
