"""A prompt from JSON messages, as chat clients write them.

    [{"role": "system", "content": "Answer from the documents."},
     {"role": "user", "content": [
        {"type": "text", "text": "…", "extras": {"minipic": {"span": true, "rank": 0}}},
        {"type": "text", "text": "Question: …"}]}]

or an object with "messages" and, as the chat template wants them, "tools".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from minipic_backend.errors import PromptError
from minipic_backend.prompt import Message, Part, Prompt, Span, Text

__all__ = ["parse_prompt"]

_MARK_KEYS = {"span", "rank", "id"}


def parse_prompt(text: str) -> Prompt:
    """The prompt in a JSON text.

    Raises:
        PromptError: no JSON, or not messages; says where.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise PromptError(f"not JSON: {error}") from error
    tools: Any = ()
    if isinstance(data, dict):
        tools = data.get("tools") or ()
        data = data.get("messages")
    if not isinstance(data, list) or not data:
        raise PromptError('expected a list of messages, or an object with "messages"')
    return Prompt.chat(
        [_message(item, f"messages[{i}]") for i, item in enumerate(data)], tools=tools
    )


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise PromptError(f'{where}: expected an object with "role" and "content"')
    extra = {key: value for key, value in item.items() if key not in ("role", "content")}
    return Message(item["role"], _parts(item.get("content"), f"{where}.content"), extra)


def _parts(content: Any, where: str) -> list[Part]:
    if content is None:  # an assistant's message of tool calls alone
        return []
    if isinstance(content, str):
        return [Text(content)]
    if not isinstance(content, list):
        raise PromptError(f"{where}: expected a string or a list of parts, not {content!r}")
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _part(part: Any, where: str) -> Part:
    if not (isinstance(part, dict) and part.get("type") == "text"):
        raise PromptError(f'{where}: expected {{"type": "text", "text": …}}; MiniPIC serves text')
    text = part.get("text")
    if not isinstance(text, str):
        raise PromptError(f"{where}.text: expected a string, not {text!r}")
    mark = (part.get("extras") or {}).get("minipic")
    if mark is None:
        return Text(text)
    if not isinstance(mark, Mapping) or set(mark) - _MARK_KEYS or not _is_bool(mark.get("span")):
        raise PromptError(
            f'{where}.extras.minipic: expected {{"span": true, "rank": 0, "id": "…"}} '
            f"(the latter two optional), not {mark!r}"
        )
    return Span(text, rank=mark.get("rank"), id=mark.get("id")) if mark["span"] else Text(text)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)
