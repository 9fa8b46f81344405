"""Which of a prompt's documents matter most to its question, by the words that they share.

For prompts whose documents come without a retriever's order, or with one that is not to be relied
on: ranks say in which order documents stand, and which are late.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from minipic_backend.errors import PromptError, shown
from minipic_backend.prompt import Span

__all__ = ["BM25", "as_text", "rank_spans", "words_of"]

_WORD = re.compile(r"\w+")


def rank_spans(documents: Iterable[str | Span], question: str) -> list[Span]:
    """Documents as spans, as given, ranked by the words that they share with the question.

        Prompt([Text(system), *rank_spans(documents, question), Text(question)])

    Args:
        documents: texts, or spans whose rank is to be replaced.
        question: what is asked of them.

    Raises:
        PromptError: neither texts nor spans.
    """
    spans = [
        one if isinstance(one, Span) else Span(as_text(one, "rank_spans")) for one in documents
    ]
    texts = [span.text for span in spans]
    ranks = BM25(texts).ranks(question, texts)
    return [replace(span, rank=rank) for span, rank in zip(spans, ranks, strict=True)]


class BM25:
    """Okapi BM25 (k1 = 1.5, b = 0.75) over a collection of texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        counts = [Counter(words_of(text)) for text in texts]
        self._number = len(counts)
        self._mean_length = sum(c.total() for c in counts) / max(1, len(counts))
        self._frequency = Counter(word for count in counts for word in count)

    def ranks(self, question: str, texts: Sequence[str]) -> list[int]:
        """The place of each text in the order of relevance, 0 the best."""
        words = set(words_of(question))
        scores = [self._score(words, Counter(words_of(text))) for text in texts]
        order = sorted(range(len(texts)), key=lambda index: -scores[index])
        ranks = [0] * len(texts)
        for place, index in enumerate(order):
            ranks[index] = place
        return ranks

    def _score(self, words: set[str], text: Counter[str]) -> float:
        length = 1 - 0.75 + 0.75 * text.total() / self._mean_length
        return sum(
            self._weight(word) * text[word] * 2.5 / (text[word] + 1.5 * length)
            for word in words
            if text[word]
        )

    def _weight(self, word: str) -> float:
        seen = self._frequency[word]
        return math.log(1 + (self._number - seen + 0.5) / (seen + 0.5))


def words_of(text: str) -> list[str]:
    """The words of a text, as they are compared: whatever their case."""
    return _WORD.findall(text.casefold())


def as_text(document: object, owner: str) -> str:
    """A document that is to be a str.

    Raises:
        PromptError: it is none; says how the frameworks' documents give theirs.
    """
    if not isinstance(document, str):
        raise PromptError(
            f"{owner} takes texts, such as [document.page_content for document in documents] with "
            "LangChain or [node.get_content() for node in nodes] with LlamaIndex, not "
            f"{type(document).__name__}: {shown(document)}"
        )
    return document
