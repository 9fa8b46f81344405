"""Which blocks of its documents a prompt computes anew: the first ones, or those asked for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from minipic_backend.layout.ranking import words_of

__all__ = ["BlockRange", "asked_for_blocks", "first_blocks"]

BlockRange = tuple[int, int]
"""First block and last + 1, counted from a document's first."""

_SATURATION = 1.2  # BM25's k1; its b is 0, for blocks are all of one length
_DOCUMENT_WEIGHT = 0.5


def first_blocks(num_blocks: int, count: int) -> list[BlockRange]:
    """The first `count` of a document's blocks."""
    return [(0, min(count, num_blocks))] if count else []


def asked_for_blocks(
    documents: Sequence[Sequence[str]], question: str, budget: float
) -> list[list[BlockRange]]:
    """The blocks that share most with the question, by BM25, up to a share of all blocks.

    A block counts for more in a document that holds such a block: the sentence that answers often
    says "he" or "the film" where the question has a name.

    Args:
        documents: the text of each block, document by document.
        question: what is asked.
        budget: share of all blocks, from 0 to 1; rounded down, but at least one block.
    """
    counts = [[Counter(_words(block)) for block in blocks] for blocks in documents]
    num_blocks = sum(map(len, counts))
    num_chosen = min(num_blocks, max(1, math.floor(budget * num_blocks + 1e-9)))
    frequency = Counter(word for blocks in counts for block in blocks for word in block)
    weights = {
        word: math.log(1 + (num_blocks - frequency[word] + 0.5) / (frequency[word] + 0.5))
        for word in set(_words(question))
        if frequency[word]
    }
    ranked = []
    for document, blocks in enumerate(counts):
        scores = [_score(block, weights) for block in blocks]
        best = max(scores, default=0.0)
        for index, score in enumerate(scores):
            ranked.append((-(score + _DOCUMENT_WEIGHT * best), index, document))
    chosen: list[set[int]] = [set() for _ in documents]
    for _, index, document in sorted(ranked)[:num_chosen]:
        chosen[document].add(index)
    return [_ranges(indices) for indices in chosen]


def _score(block: Counter[str], weights: dict[str, float]) -> float:
    return sum(
        weight * (1 + _SATURATION) * block[word] / (block[word] + _SATURATION)
        for word, weight in weights.items()
        if block[word]
    )


@lru_cache(maxsize=16384)
def _words(text: str) -> tuple[str, ...]:
    return tuple(words_of(text))


def _ranges(indices: set[int]) -> list[BlockRange]:
    """Runs of consecutive numbers."""
    runs = groupby(enumerate(sorted(indices)), key=lambda pair: pair[1] - pair[0])
    lists = [[index for _, index in run] for _, run in runs]
    return [(run[0], run[-1] + 1) for run in lists]
