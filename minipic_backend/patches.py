"""Patches: parts of spans that a prompt computes anew, in context, behind its spans.

    [prefix][SSep d1][SSep d2][d1's first block][d2's first block][PDep question]

A span stays whole in the prompt, so that it stays a hit. A patch stands at the logical positions of
the tokens that it replaces, sees what stands in front of them logically, and is seen in their place
by everything behind it. EPIC's heads, selective recomputation and Prompt Cache's arguments are
patches that differ in which tokens they replace, and by what.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from minipic_backend.errors import ConfigurationError

__all__ = ["Patch", "as_patches"]


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


def as_patches(values: Any) -> tuple[Patch, ...]:
    """Patches from triples of whole numbers, as JSON has them.

    Raises:
        ConfigurationError: anything else, or patches that are not in the order of the prompt.
    """
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise ConfigurationError(f"patches={values!r}: a list of [at, start, end]")
    patches = tuple(Patch(*map(_index, _triple(value))) for value in values)
    for before, patch in zip((None, *patches), patches, strict=False):
        if not patch.start < patch.end <= patch.at:
            raise ConfigurationError(f"{patch}: replaces tokens in front of it, at least one")
        if before is not None and patch.at <= before.at:
            raise ConfigurationError(f"{patch} does not come behind {before}")
    return patches


def _triple(value: Any) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 3:
        raise ConfigurationError(f"A patch is three whole numbers, not {value!r}")
    return value


def _index(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigurationError(f"A patch is three whole numbers from 0, not {value!r}")
    return value
