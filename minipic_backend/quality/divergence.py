"""How far a technique's next-token distributions are from full attention's."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["agrees", "divergence"]


def divergence(full: Mapping[int, float], other: Mapping[int, float]) -> float:
    """KL(full ‖ other) in nats, from the most likely tokens of both.

    Tokens that both name count one by one, all others together as one. Merging outcomes never
    raises a divergence: the figure is a lower bound of the one over the whole vocabulary, and
    close to it where the named tokens hold most of the probability.

    Args:
        full: log-probabilities of full attention's most likely tokens.
        other: the technique's.
    """
    shared = full.keys() & other.keys()
    result = sum(math.exp(full[token]) * (full[token] - other[token]) for token in shared)
    rest = [max(1.0 - sum(math.exp(p[token]) for token in shared), 1e-9) for p in (full, other)]
    return max(0.0, result + rest[0] * math.log(rest[0] / rest[1]))


def agrees(full: Mapping[int, float], other: Mapping[int, float]) -> bool:
    """Whether both would say the same token."""
    return max(full, key=full.__getitem__) == max(other, key=other.__getitem__)
