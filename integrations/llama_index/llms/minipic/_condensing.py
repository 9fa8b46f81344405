"""Prompts in which LlamaIndex wrote a whole chat down as one text, to condense a question.

No memory of LlamaIndex's sees to it that they fit. They are told by the templates of its chat
engines; with another template, a prompt that is too long is refused as any other.
"""

from __future__ import annotations

from collections.abc import Callable

from llama_index.core.chat_engine.condense_plus_context import DEFAULT_CONDENSE_PROMPT_TEMPLATE
from llama_index.core.chat_engine.condense_question import DEFAULT_TEMPLATE
from llama_index.llms.minipic._history import trimmed_transcript

__all__ = ["with_less_history"]

_TEMPLATES = (DEFAULT_CONDENSE_PROMPT_TEMPLATE, DEFAULT_TEMPLATE)


def with_less_history(text: str, fits: Callable[[str], bool]) -> str:
    """The prompt less as many old turns of the chat in it as it takes until it fits."""
    parts = _split(text)
    if parts is None:
        return text
    before, transcript, behind = parts
    kept = trimmed_transcript(transcript, lambda kept: fits(before + kept + behind))
    return before + kept + behind


def _split(text: str) -> tuple[str, str, str] | None:
    for template in _TEMPLATES:
        head, _, rest = template.partition("{chat_history}")
        middle, _, tail = rest.partition("{question}")
        start, end = len(head), text.rfind(middle)
        if text.startswith(head) and text.endswith(tail) and end >= start:
            return head, text[start:end], text[end:]
    return None
