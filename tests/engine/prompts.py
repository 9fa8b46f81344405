"""Small real documents, and prompts made of them token by token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pydoc_data.topics import topics
from typing import Any

from minipic_backend.config import SpanConfig

__all__ = ["PromptMaker", "passages"]


@cache
def passages() -> tuple[str, ...]:
    """Paragraphs of the Python language reference, as Python itself carries it."""
    found = []
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            text = " ".join(paragraph.split())
            if 120 <= len(text) <= 220 and text.endswith("."):
                found.append(text)
    return tuple(found)


class PromptMaker:
    """Token prompts for one tokenizer and one engine configuration."""

    def __init__(self, tokenizer: Any, config: SpanConfig) -> None:
        self._tokenizer = tokenizer
        self.config = config
        self.block_size = config.block_size

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def fill(self, ids: Sequence[int], filler: int) -> list[int]:
        """Up to a block boundary."""
        return [*ids, *[filler] * (-len(ids) % self.block_size)]

    def prefix(self, system: str = "Answer from the documents.") -> list[int]:
        text = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
        return self.fill(self.encode(text), self.encode("\n")[0])

    def span(self, document: str) -> list[int]:
        return self.fill([self.config.ssep, *self.encode(document + "\n\n")], self.config.pad)

    def spans(self, count: int, first: int = 0) -> list[list[int]]:
        return [self.span(text) for text in passages()[first : first + count]]

    def text(self, text: str) -> list[int]:
        """A dependent segment with something behind it."""
        return self.fill([self.config.pdep, *self.encode(text)], self.config.pad)

    def question(self, text: str = "What do the documents say?") -> list[int]:
        return [
            self.config.pdep,
            *self.encode(f"Question: {text}<|im_end|>\n<|im_start|>assistant\n"),
        ]

    def usual(
        self, num_documents: int = 5, *, first: int = 0, system: str | None = None
    ) -> list[int]:
        """[prefix][SSep doc]…[PDep question]."""
        prefix = self.prefix(system) if system else self.prefix()
        return join(prefix, *self.spans(num_documents, first), self.question())


def join(*parts: Sequence[int]) -> list[int]:
    return [token for part in parts for token in part]
