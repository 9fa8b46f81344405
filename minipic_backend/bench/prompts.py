"""Prompts of random token ids, with and without spans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from minipic_backend.bench.engines import MARKERS

__all__ = ["FIRST_ID", "LAST_ID", "RandomPrompts", "passage_lengths", "wiki_shaped_lengths"]

FIRST_ID, LAST_ID = 10, 1000


class RandomPrompts:
    """A seeded source of token ids that no cache has seen.

    Args:
        seed: the same seed gives the same prompts.
        block_size: of the engine, for spans.
    """

    def __init__(self, seed: int, block_size: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._block_size = block_size

    def tokens(self, count: int) -> list[int]:
        """`count` ordinary token ids."""
        ids: list[int] = self._rng.integers(FIRST_ID, LAST_ID, size=count).tolist()
        return ids

    def prefix(self, count: int) -> list[int]:
        """A prefix of whole blocks, `count` tokens or a little more."""
        return self.as_prefix(self.tokens(count))

    def span(self, count: int) -> list[int]:
        """[SSep, tokens, pads]: a document of `count` tokens, the marker included."""
        return self.as_span(self.tokens(count - 1))

    def question(self, count: int) -> list[int]:
        """[PDep, tokens]: `count` tokens, the marker included."""
        return self.as_question(self.tokens(count - 1))

    def as_prefix(self, ids: Sequence[int]) -> list[int]:
        """The ids, with more of them up to a block boundary."""
        return [*ids, *self.tokens(-len(ids) % self._block_size)]

    def as_span(self, ids: Sequence[int]) -> list[int]:
        """[SSep, ids, pads]."""
        padding = -(len(ids) + 1) % self._block_size
        return [MARKERS["ssep"], *ids, *[MARKERS["pad"]] * padding]

    def as_question(self, ids: Sequence[int]) -> list[int]:
        """[PDep, ids]."""
        return [MARKERS["pdep"], *ids]

    def shuffled(self, documents: list[list[int]]) -> list[list[int]]:
        """The same documents in another order."""
        return [documents[i] for i in self._rng.permutation(len(documents))]


def wiki_shaped_lengths(count: int, seed: int) -> list[int]:
    """Prompt lengths like the paper's 2Wiki workload: ten passages of 121 tokens on average, with a
    long tail, and 60 for the rest; mean about 1,260 tokens."""
    passages = passage_lengths((count, 10), seed)
    lengths: list[int] = (passages.sum(axis=1) + 60).astype(int).tolist()
    return lengths


def passage_lengths(shape: tuple[int, ...], seed: int) -> NDArray[np.float64]:
    """Lengths like those of 2Wiki's passages: median 81 tokens, mean 121, a long tail."""
    rng = np.random.default_rng(seed)
    return rng.lognormal(mean=np.log(81.0), sigma=0.895, size=shape).clip(12, 900)
