"""Chat messages as JSON clients write them, and the mark that makes a part of one a span.

    [{"role": "system", "content": "Answer from the documents."},
     {"role": "user", "content": [
        {"type": "text", "text": "…", "minipic": {"span": true, "rank": 0, "id": "…"}},
        {"type": "text", "text": "Question: …"}]}]

The mark may also stand inside `extras`, where LangChain keeps what it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from minipic_backend.errors import PromptError, shown
from minipic_backend.prompt import Message, Part, Span, Text

__all__ = ["MARK", "has_marks", "read_messages"]

MARK = "minipic"
_MARK_KEYS = {"span", "rank", "id"}
_TEXT_TYPES = ("text", "input_text", "output_text")
_REASONING_TYPES = ("thinking", "reasoning")


def has_marks(messages: Iterable[Any]) -> bool:
    """Whether any message, or any part of one, carries a mark, a malformed one included."""
    return any(
        _mark(one) is not None for message in messages for one in (message, *_content_list(message))
    )


def read_messages(
    items: Sequence[Any], *, where: str = "messages", between_texts: str = ""
) -> list[Message]:
    """Messages with texts and spans.

    Args:
        items: JSON objects with "role" and "content"; all other keys go to the chat template.
            Arguments of tool calls become objects where they are JSON texts, as templates want.
        where: what to call the list in errors.
        between_texts: stands between two neighbouring texts of a message.

    Raises:
        PromptError: something else than messages of text; says where.
    """
    return [_message(item, f"{where}[{i}]", between_texts) for i, item in enumerate(items)]


def _message(item: Any, where: str, between_texts: str) -> Message:
    if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
        raise PromptError(f'{where}: expected an object with "role" and "content"')
    if _mark(item) is not None:
        raise PromptError(
            f"{where}: a mark stands on a part of the content, not on a message: "
            '"content": [{"type": "text", "text": …, "minipic": {"span": true}}, …]'
        )
    extra = {key: value for key, value in item.items() if key not in ("role", "content")}
    if extra.get("tool_calls"):
        extra["tool_calls"] = _tool_calls(extra["tool_calls"], f"{where}.tool_calls")
    parts = _parts(item.get("content"), f"{where}.content")
    spaced: list[Part] = []
    for part in parts:
        if between_texts and spaced and isinstance(part, Text) and isinstance(spaced[-1], Text):
            spaced.append(Text(between_texts))
        spaced.append(part)
    return Message(item["role"], spaced, extra)


def _parts(content: Any, where: str) -> list[Part]:
    if content is None:  # an assistant's message of tool calls alone
        return []
    if isinstance(content, str):
        return [Text(content)]
    if not isinstance(content, Iterable) or isinstance(content, Mapping):
        raise PromptError(f"{where}: expected a string or a list of parts, not {shown(content)}")
    found = (_part(part, f"{where}[{i}]") for i, part in enumerate(content))
    return [part for part in found if part is not None]


def _part(part: Any, where: str) -> Part | None:
    if isinstance(part, str):
        return Text(part)
    if isinstance(part, Mapping) and part.get("type") in _REASONING_TYPES:
        return None  # the template takes an answer's reasoning, if at all, from another key
    if not (isinstance(part, Mapping) and part.get("type") in _TEXT_TYPES):
        raise PromptError(f'{where}: expected {{"type": "text", "text": …}}; MiniPIC serves text')
    text = part.get("text")
    if not isinstance(text, str):
        raise PromptError(f"{where}.text: expected a string, not {shown(text)}")
    mark = _mark(part)
    if mark is None:
        return Text(text)
    place = f"{where}.{MARK}" if MARK in part else f"{where}.extras.{MARK}"
    if not isinstance(mark, Mapping) or set(mark) - _MARK_KEYS or not _is_bool(mark.get("span")):
        raise PromptError(
            f'{place}: expected {{"span": true, "rank": 0, "id": "…"}} '
            f"(the latter two optional), not {shown(mark)}"
        )
    rank, name = mark.get("rank"), mark.get("id")
    if rank is not None and (not isinstance(rank, int) or _is_bool(rank) or rank < 0):
        raise PromptError(f"{place}.rank: expected a whole number from 0, not {shown(rank)}")
    if name is not None and not isinstance(name, str):
        raise PromptError(f"{place}.id: expected a string, not {shown(name)}")
    return Span(text, rank=rank, id=name) if mark["span"] else Text(text)


def _tool_calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, Iterable) or isinstance(calls, str | Mapping):
        raise PromptError(f"{where}: expected a list of objects, not {shown(calls)}")
    read = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise PromptError(f'{where}[{index}]: expected an object with "function"')
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise PromptError(f"{where}[{index}].function.arguments: {error}") from error
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def _mark(part: Any) -> Any:
    """A part's mark, whatever it holds; None where it has none."""
    if not isinstance(part, Mapping):
        return None
    if part.get(MARK) is not None:
        return part[MARK]
    extras = part.get("extras")
    return extras.get(MARK) if isinstance(extras, Mapping) else None


def _content_list(message: Any) -> list[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else []


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)
