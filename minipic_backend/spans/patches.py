"""Patches: parts of spans that a prompt computes anew, in context, behind its spans. And places.

    [prefix][SSep d1][SSep d2][d1's first block][d2's first block][PDep question]

A span stays whole in the prompt, so that it stays a hit. A patch stands at the logical positions of
the tokens that it replaces, sees what stands in front of them logically, and is seen in their place
by everything behind it. EPIC's heads, selective recomputation and Prompt Cache's arguments are
patches that differ in which tokens they replace, and by what.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

from minipic_backend.errors import ConfigurationError, shown

__all__ = ["Patch", "Place", "as_patches", "as_places", "is_whole"]


class Patch(NamedTuple):
    """A segment in place of some tokens of a span. Token indices count from the prompt's start.

    Args:
        at: where the segment starts: a block boundary, whatever its first token is.
        start: first token of the span that it replaces.
        end: index behind the last one.
    """

    at: int
    start: int
    end: int


class Place(NamedTuple):
    """Where a segment stands logically, if not right behind the one in front.

    Args:
        at: its first token's index in the prompt.
        offset: its first token's logical position.
    """

    at: int
    offset: int


def as_places(values: Any) -> tuple[Place, ...]:
    """Places from pairs of whole numbers, as JSON has them.

    Raises:
        ConfigurationError: anything else, or places that are not in order.
    """
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise ConfigurationError(f"places={shown(values)}: a list of [at, offset]")
    places = tuple(Place(*map(_index, _numbers(value, 2))) for value in values)
    for before, place in pairwise(places):
        if place.at <= before.at or place.offset < before.offset:
            raise ConfigurationError(f"{place} does not come behind {before}")
    return places


def as_patches(values: Any) -> tuple[Patch, ...]:
    """Patches from triples of whole numbers, as JSON has them.

    Raises:
        ConfigurationError: anything else, or patches that are not in the order of the prompt.
    """
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise ConfigurationError(f"patches={shown(values)}: a list of [at, start, end]")
    patches = tuple(Patch(*map(_index, _numbers(value, 3))) for value in values)
    for before, patch in zip((None, *patches), patches, strict=False):
        if not patch.start < patch.end <= patch.at:
            raise ConfigurationError(f"{patch}: replaces tokens in front of it, at least one")
        if before is not None and patch.at <= before.at:
            raise ConfigurationError(f"{patch} does not come behind {before}")
    return patches


def _numbers(value: Any, count: int) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != count:
        raise ConfigurationError(f"A list of {count} whole numbers, please, not {shown(value)}")
    return value


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether it is a whole number from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _index(value: Any) -> int:
    if not is_whole(value):
        raise ConfigurationError(f"A whole number from 0, please, not {shown(value)}")
    return value
