"""Prompts of random token ids, with and without spans."""

from __future__ import annotations

import numpy as np

from minipic_backend.bench.engines import MARKERS

__all__ = ["RandomPrompts", "wiki_shaped_lengths"]

_FIRST_ID, _LAST_ID = 10, 1000


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
        ids: list[int] = self._rng.integers(_FIRST_ID, _LAST_ID, size=count).tolist()
        return ids

    def prefix(self, count: int) -> list[int]:
        """A prefix of whole blocks, `count` tokens or a little more."""
        return self.tokens(-(-count // self._block_size) * self._block_size)

    def span(self, count: int) -> list[int]:
        """[SSep, tokens, pads]: a document of `count` tokens, the marker included."""
        ids = [MARKERS["ssep"], *self.tokens(count - 1)]
        return ids + [MARKERS["pad"]] * (-len(ids) % self._block_size)

    def question(self, count: int) -> list[int]:
        """[PDep, tokens]: `count` tokens, the marker included."""
        return [MARKERS["pdep"], *self.tokens(count - 1)]

    def shuffled(self, documents: list[list[int]]) -> list[list[int]]:
        """The same documents in another order."""
        return [documents[i] for i in self._rng.permutation(len(documents))]


def wiki_shaped_lengths(count: int, seed: int) -> list[int]:
    """Prompt lengths like the paper's 2Wiki workload: ten passages of 121 tokens on average, with a
    long tail, and 60 for the rest; mean about 1,260 tokens."""
    rng = np.random.default_rng(seed)
    passages = rng.lognormal(mean=np.log(81.0), sigma=0.895, size=(count, 10)).clip(12, 900)
    lengths: list[int] = (passages.sum(axis=1) + 60).astype(int).tolist()
    return lengths
