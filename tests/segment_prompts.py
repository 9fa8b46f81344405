"""Random prompts of segments, with small blocks, for property tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from minipic_backend.config import SpanConfig, SpanOptions
from minipic_backend.spans.patches import Patch, Place
from minipic_backend.spans.segments import SegmentTable, parse_segments

__all__ = [
    "CONFIG",
    "PAD",
    "PDEP",
    "SSEP",
    "Drawn",
    "all_options",
    "given",
    "patched_prompts",
    "prompts",
    "words",
]

SSEP, PDEP, PAD = 1, 2, 3
CONFIG = SpanConfig(ssep=SSEP, pdep=PDEP, pad=PAD, block_size=4)


def given(*strategies: Any) -> Callable[[Any], Any]:
    """Hypothesis's `given`, on a machine that has other things to do as well."""
    quiet = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    return lambda test: quiet(hypothesis_given(*strategies)(test))


words = st.integers(10, 13)  # few, so that equal blocks occur

all_options = st.builds(
    SpanOptions,
    frame=st.sampled_from(["none", "prefix"]),
    offsets=st.sampled_from(["compact", "padded"]),
    see_markers=st.booleans(),
)


@dataclass(frozen=True)
class Drawn:
    """A prompt as it was put together: its parts, and how many pads each ends with."""

    parts: tuple[tuple[int, ...], ...]
    num_pads: tuple[int, ...]
    patches: tuple[Patch, ...] = ()
    gaps: tuple[int, ...] = ()
    """In front of each part, in positions; none in front of the first and of patches."""
    seen_prefix: int | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token for part in self.parts for token in part]

    def table(self, options: SpanOptions, config: SpanConfig = CONFIG) -> SegmentTable:
        options = replace(options, patches=self.patches, seen_prefix=self.seen_prefix)
        table = parse_segments(self.token_ids, config, options)
        if table is not None and any(self.gaps):
            places, total = [], 0
            for segment, gap in zip(table.segments, self.gaps, strict=True):
                total += gap
                if gap:
                    places.append(Place(segment.start, segment.offset + total))
            options = replace(options, places=tuple(places))
            table = parse_segments(self.token_ids, config, options)
        assert table is not None
        return table


def _filled(tokens: list[int]) -> tuple[int, ...]:
    return (*tokens, *[PAD] * (-len(tokens) % CONFIG.block_size))


@st.composite
def prompts(draw: st.DrawFn, *, min_segments: int = 1, max_segments: int = 6) -> Drawn:
    """[prefix][SSep …][PDep …]… in any order, ending in a dependent segment; or one lone span."""
    size = CONFIG.block_size
    body = st.lists(words, max_size=2 * size)
    if min_segments <= 1 and draw(st.integers(0, 7)) == 0:
        lone = _filled([SSEP, *draw(body)])
        return Drawn((lone,), (sum(token == PAD for token in lone),))
    num_blocks = draw(st.integers(0, 2))
    prefix = draw(st.lists(words, min_size=num_blocks * size, max_size=num_blocks * size))
    middle = draw(
        st.lists(
            st.tuples(st.sampled_from([SSEP, SSEP, PDEP]), body),
            min_size=max(0, min_segments - 1),
            max_size=max_segments - 1,
        )
    )
    parts = [tuple(prefix)] if prefix else []
    parts += [_filled([marker, *tokens]) for marker, tokens in middle]
    parts.append((PDEP, *draw(st.lists(words, max_size=2 * size + 1))))
    seen = draw(st.none() | st.integers(0, len(prefix) - 1)) if prefix else None
    num_pads = tuple(sum(token == PAD for token in part) for part in parts)
    return Drawn(tuple(parts), num_pads, seen_prefix=seen)


@st.composite
def patched_prompts(draw: st.DrawFn, *, max_segments: int = 5, places: bool = False) -> Drawn:
    """A prompt with spans, and patches of any of their tokens in front of its last segment: the
    same tokens again, or others, up to as many, or none. With `places`, some segments stand further
    on."""
    drawn = draw(prompts(min_segments=2, max_segments=max_segments))
    *front, last = drawn.parts
    patches: list[tuple[tuple[int, ...], int, int]] = []
    start = 0
    for part in front:
        cuts = draw(st.lists(st.integers(0, len(part)), max_size=4, unique=True).map(sorted))
        for lo, hi in zip(cuts[::2], cuts[1::2], strict=False):
            again = part[lo:hi]
            num_tokens = sum(token != PAD for token in again)
            if part[0] == SSEP and num_tokens:
                other = tuple(draw(st.lists(words, max_size=num_tokens)))
                tokens = draw(st.sampled_from([again, other])) or (PAD,)
                patches.append((_filled(list(tokens)), start + lo, start + hi))
        start += len(part)
    patches = draw(st.permutations(patches))
    at = []
    for tokens, _, _ in patches:
        at.append(start)
        start += len(tokens)
    parts = (*front, *(tokens for tokens, _, _ in patches), last)
    gap = st.integers(0, 3) if places else st.just(0)
    gaps = [*(draw(gap) for _ in front[1:]), *(0 for _ in patches), draw(gap)]
    return Drawn(
        parts,
        tuple(sum(token == PAD for token in part) for part in parts),
        tuple(Patch(a, lo, hi) for a, (_, lo, hi) in zip(at, patches, strict=True)),
        (0, *gaps) if len(parts) > 1 else (0,),
        drawn.seen_prefix,
    )
