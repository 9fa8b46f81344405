"""The segments of a prompt, read from its token ids alone.

    [prefix … newline pads][SSep doc1 … pads][SSep doc2 … pads][PDep question …]

A marker counts only as the first token of a block. Everything that the engine does differently
for spans (hashes, positions, attention) follows from the table made here, so that client,
scheduler and worker cannot disagree.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from minipic_backend.config import SpanConfig, SpanOptions
from minipic_backend.errors import MalformedSpansError
from minipic_backend.spans.patches import Patch

__all__ = [
    "Segment",
    "SegmentKind",
    "SegmentTable",
    "has_markers",
    "is_framed_span",
    "parse_segments",
]


MAX_VIEWS = 1 << 21
"""Dependent segments times what each may see: what a prompt may ask of a step, in all processes."""


class SegmentKind(Enum):
    PREFIX = "prefix"
    SPAN = "span"
    DEPENDENT = "dependent"


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of whole blocks (the last segment of a prompt may end inside a block).

    Args:
        kind: prefix, span or dependent.
        start: index of its first token in the prompt.
        end: index behind its last token, pads included.
        num_pads: pads at its end, seen by no later token.
        offset: logical position of its first token.
        cached_position: position under which its first token is computed and cached (the model's
            rotary embedding sees these). Differs from `offset` for spans only.
        replaced: of a patch: first and last + 1 of the tokens that it stands for.
        repeats_marker: its first token is that of a span, again.
        is_placed: the request's options say where it stands.
    """

    kind: SegmentKind
    start: int
    end: int
    num_pads: int
    offset: int
    cached_position: int
    replaced: tuple[int, int] | None = None
    repeats_marker: bool = False
    is_placed: bool = False

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def shift(self) -> int:
        """Tokens between cached and logical position: a later query at logical position t meets
        a key cached at p as if the key stood at p + shift."""
        return self.offset - self.cached_position


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """Segments of one prompt, in order; they cover it without gaps.

    Args:
        segments: at least two, or one that starts with a marker.
        num_prompt_tokens: length of the prompt.
        options: what they were computed with.
    """

    segments: tuple[Segment, ...]
    num_prompt_tokens: int
    options: SpanOptions

    @property
    def num_frame_tokens(self) -> int:
        """Tokens of the context that every span is computed behind (whole blocks; 0 = none)."""
        first = self.segments[0]
        if self.options.frame == "prefix" and first.kind is SegmentKind.PREFIX:
            return first.num_tokens
        return 0

    @property
    def last(self) -> Segment:
        return self.segments[-1]

    def cached_positions(self, start: int, end: int) -> NDArray[np.int64]:
        """Positions that the model's rotary embedding sees, for tokens [start, end).

        Tokens behind the prompt are generated: they continue the last segment, or, behind a
        span, a dependent segment of their own. Returns int64 of shape [end - start].
        """
        return self._positions(start, end, cached=True)

    def logical_positions(self, start: int, end: int) -> NDArray[np.int64]:
        """Positions that later tokens see, for tokens [start, end); int64, [end - start]."""
        return self._positions(start, end, cached=False)

    def visible(self, start: int, end: int) -> NDArray[np.bool_]:
        """Whether later dependent tokens see token i, for i in [start, end); bool, [end - start].

        Pads are hidden; so are the SSep tokens unless `options.see_markers`, and what lies in the
        prefix behind `options.seen_prefix`. Of patches this says nothing: see `seen_before`.
        """
        result = np.ones(end - start, dtype=np.bool_)
        for segment in self.segments:
            lo, hi = self._visible_range(segment)
            _fill(result, start, segment.start, lo)
            _fill(result, start, hi, segment.end)
        return result

    def seen_before(self, index: int) -> Iterator[tuple[Segment, int, int]]:
        """What a prefix or dependent segment sees of those in front of it.

        A patch sees what stands in front of it logically; what a patch replaces is seen by no
        token from the patch on.

        Args:
            index: of the segment; len(segments) is one behind the prompt.

        Yields:
            (segment, start, end): tokens [start, end) of a segment, in the order of the prompt.
        """
        readers = self.segments[: index + 1]
        limit = readers[index].offset if index < len(readers) and readers[index].replaced else None
        holes = sorted(patch.replaced for patch in readers if patch.replaced)
        for segment in self.segments[:index]:
            start, end = self._visible_range(segment)
            if limit is not None:
                end = min(end, segment.start + limit - segment.offset)
            while holes and holes[0][0] < segment.end:
                hole_start, hole_end = holes.pop(0)
                if start < min(hole_start, end):
                    yield segment, start, min(hole_start, end)
                start = max(start, hole_end)
            if start < end:
                yield segment, start, end

    @property
    def max_seen(self) -> int:
        """The most ranges that one token sees, its own segment included: a patch may cut one in
        two, and generated tokens may have a segment of their own."""
        return len(self.segments) + len(self.options.patches) + 1

    @property
    def steady_from(self) -> int:
        """The token from which on all see the same segments: the start of the last segment, or, as
        tokens generated behind a lone span have a segment of their own, of those."""
        is_span = self.last.kind is SegmentKind.SPAN
        return self.num_prompt_tokens if is_span else self.last.start

    @property
    def dependent_from(self) -> int:
        """The token from which on all belong to dependent segments; generated ones do."""
        for segment in reversed(self.segments):
            if segment.kind is not SegmentKind.DEPENDENT:
                return segment.end
        return 0

    @property
    def generated_position(self) -> int:
        """Logical (and cached) position of the first generated token."""
        return self.last.offset + self.last.num_tokens - self.last.num_pads

    def _visible_range(self, segment: Segment) -> tuple[int, int]:
        """The tokens of a segment that later dependent ones may see."""
        if segment.kind is SegmentKind.PREFIX and self.options.seen_prefix is not None:
            return segment.start, min(segment.end - segment.num_pads, self.options.seen_prefix)
        is_marked = segment.kind is SegmentKind.SPAN or segment.repeats_marker
        hidden = is_marked and not self.options.see_markers
        return segment.start + hidden, segment.end - segment.num_pads

    def _positions(self, start: int, end: int, *, cached: bool) -> NDArray[np.int64]:
        result = np.arange(start, end, dtype=np.int64)
        for segment in self.segments:
            lo, hi = max(segment.start, start), min(segment.end, end)
            if lo < hi:
                first = segment.cached_position if cached else segment.offset
                result[lo - start : hi - start] += first - segment.start
        if end > self.num_prompt_tokens:
            lo = max(self.num_prompt_tokens, start)
            result[lo - start :] += self.generated_position - self.num_prompt_tokens
        return result


def _fill(array: NDArray[np.bool_], base: int, lo: int, hi: int) -> None:
    array[max(lo - base, 0) : max(hi - base, 0)] = False


def parse_segments(
    token_ids: Sequence[int] | NDArray[np.integer], config: SpanConfig, options: SpanOptions
) -> SegmentTable | None:
    """Reads the segment table of a prompt; None where it has no markers (an ordinary prompt).

    Args:
        token_ids: the prompt, [num_tokens].
        config: token ids of the markers and the pad, block size.
        options: what a request chose.

    Raises:
        MalformedSpansError: a marker inside a block, a pad before the end of a segment or in the
            prefix or at the end of the prompt, a prompt of several segments that ends in a
            span, a span that ends in a whole block of pads, too many dependent segments, or a
            patch, a place or a hidden end of the prefix where there may be none.
    """
    if not has_markers(token_ids, config):
        if options.names_tokens:
            raise MalformedSpansError("Patches, places or seen_prefix in a prompt without spans", 0)
        return None
    tokens = np.asarray(token_ids, dtype=np.int64)
    is_marker = (tokens == config.ssep) | (tokens == config.pdep)
    starts = np.flatnonzero(is_marker)
    misplaced = starts[starts % config.block_size != 0]
    if misplaced.size:
        index = int(misplaced[0])
        raise MalformedSpansError(
            f"Marker token {int(tokens[index])} stands inside a block; markers start a block of "
            f"{config.block_size} tokens",
            index,
        )
    patches = {patch.at: patch for patch in options.patches if patch.at < len(tokens)}
    bounds = sorted({0, *map(int, starts), *patches, len(tokens)})
    places = dict(options.places)
    inner = set(bounds[1:-1])
    for at in places:
        if at not in inner or at in patches:
            raise MalformedSpansError("A place for what is no segment behind the first", at)
    num_dependent = int((tokens[starts] == config.pdep).sum()) + len(patches)
    if num_dependent * (len(bounds) + len(patches)) > MAX_VIEWS:
        raise MalformedSpansError(
            f"{num_dependent} dependent segments among {len(bounds) - 1}: too many", int(starts[-1])
        )

    segments: list[Segment] = []
    replaced: list[tuple[int, int]] = []
    offset = num_frame_tokens = num_patch_tokens = 0
    pads_at = np.flatnonzero(tokens == config.pad)
    first_pads = np.searchsorted(pads_at, bounds).tolist()
    for index, (start, end) in enumerate(pairwise(bounds)):
        patch = patches.get(start)
        kind = SegmentKind.DEPENDENT if patch else _kind(int(tokens[start]), config)
        num_pads = first_pads[index + 1] - first_pads[index]
        if num_pads:
            first_pad = int(pads_at[first_pads[index]])
            _check_pads(first_pad, num_pads, end, kind, config, is_last=end == bounds[-1])
        if patch is not None:
            _check_patch(patch, segments, replaced, end - num_pads, config.block_size)
            insort(replaced, (patch.start, patch.end))
            segments.append(_patch_segment(patch, segments, end, num_pads))
            num_patch_tokens += end - start
            continue
        if options.offsets == "padded":
            offset = max(offset, start - num_patch_tokens)
        if places.get(start, offset) < offset:
            raise MalformedSpansError("A place that another segment takes", start)
        offset = places.get(start, offset)
        if kind is SegmentKind.PREFIX and options.frame == "prefix":
            num_frame_tokens = end
        cached_position = num_frame_tokens if kind is SegmentKind.SPAN else offset
        segments.append(
            Segment(kind, start, end, num_pads, offset, cached_position, is_placed=start in places)
        )
        offset += end - start - num_pads
    first = segments[0]
    num_prefix_tokens = first.num_tokens if first.kind is SegmentKind.PREFIX else 0
    if options.seen_prefix is not None and not options.seen_prefix < num_prefix_tokens:
        raise MalformedSpansError(
            f"seen_prefix={options.seen_prefix}: fewer than the {num_prefix_tokens} tokens of the "
            "prefix",
            0,
        )
    if options.patches and (segments[-1].replaced or len(patches) < len(options.patches)):
        raise MalformedSpansError(
            "A patch ends the prompt; end it with a dependent segment", options.patches[-1].at
        )
    if len(segments) > 1 and segments[-1].kind is SegmentKind.SPAN:
        raise MalformedSpansError(
            "A prompt of several segments ends in a span; end it with a dependent segment",
            segments[-1].start,
        )
    return SegmentTable(tuple(segments), len(tokens), options)


def _source(patch: Patch, segments: Sequence[Segment]) -> Segment | None:
    """The segment that holds the first token that a patch replaces."""
    index = bisect_right(segments, patch.start, key=lambda segment: segment.start) - 1
    return segments[index] if index >= 0 else None


def _patch_segment(patch: Patch, segments: Sequence[Segment], end: int, num_pads: int) -> Segment:
    span = _source(patch, segments)
    assert span is not None
    position = span.offset + patch.start - span.start
    return Segment(
        SegmentKind.DEPENDENT,
        patch.at,
        end,
        num_pads,
        position,
        position,
        replaced=(patch.start, patch.end),
        repeats_marker=patch.start == span.start,
    )


def _overlaps(patch: Patch, replaced: Sequence[tuple[int, int]]) -> bool:
    """Whether one of some ranges, sorted and disjoint, has a token that a patch replaces."""
    index = bisect_left(replaced, (patch.end, patch.end)) - 1
    return index >= 0 and replaced[index][1] > patch.start


def _check_patch(
    patch: Patch,
    segments: Sequence[Segment],
    replaced: Sequence[tuple[int, int]],
    end: int,
    block_size: int,
) -> None:
    """Refuses a patch, whose last token but for pads is that before `end`, in the wrong place."""
    source = _source(patch, segments)
    is_in_span = source is not None and source.kind is SegmentKind.SPAN and patch.end <= source.end
    num_replaced = patch.end - patch.start
    if source is not None:
        num_replaced = min(patch.end, source.end - source.num_pads) - patch.start
    for wrong, what in (
        (patch.at % block_size != 0, f"starts inside a block of {block_size} tokens"),
        (not is_in_span, "replaces tokens that are not those of one span"),
        (
            _overlaps(patch, replaced),
            "replaces tokens that another one does",
        ),
        (end - patch.at > num_replaced, "is longer than what it replaces"),
    ):
        if wrong:
            raise MalformedSpansError(
                f"The patch of tokens {patch.start} to {patch.end} {what}", patch.at
            )


def has_markers(token_ids: Sequence[int] | NDArray[np.integer], config: SpanConfig) -> bool:
    """Whether a prompt, [num_tokens], is no ordinary one. The cheapest pass over a list: whoever
    takes in a request makes one."""
    if isinstance(token_ids, np.ndarray):
        return bool(((token_ids == config.ssep) | (token_ids == config.pdep)).any())
    # By equality, not by hash: of the numbers of a tensor, say, each has a hash of its own.
    return config.ssep in token_ids or config.pdep in token_ids


def is_framed_span(token_ids: Sequence[int] | NDArray[np.integer], config: SpanConfig) -> bool:
    """Whether a prompt is one span behind a prefix, with nothing behind it.

    Refused of users (`parse_segments`), so that it can only be what the scheduler computes ahead:
    by the definition of a frame an ordinary sequence, whose positions simply run on.
    """
    tokens = np.asarray(token_ids, dtype=np.int64)
    (markers,) = np.nonzero((tokens == config.ssep) | (tokens == config.pdep))
    return bool(markers.size == 1 and markers[0] > 0 and tokens[markers[0]] == config.ssep)


def _kind(first_token: int, config: SpanConfig) -> SegmentKind:
    if first_token == config.ssep:
        return SegmentKind.SPAN
    return SegmentKind.DEPENDENT if first_token == config.pdep else SegmentKind.PREFIX


def _check_pads(
    first: int, num_pads: int, end: int, kind: SegmentKind, config: SpanConfig, *, is_last: bool
) -> None:
    """Refuses pads, from token `first` on, but at the end of a segment that ends at `end`."""
    if kind is SegmentKind.PREFIX:
        raise MalformedSpansError(
            "The pad token stands in the prefix, whose pads are ordinary tokens", first
        )
    if num_pads != end - first:
        raise MalformedSpansError("A pad token stands before the end of a segment", first)
    if is_last and kind is SegmentKind.DEPENDENT:
        raise MalformedSpansError("The prompt ends in pad tokens", first)
    if kind is SegmentKind.SPAN and num_pads >= config.block_size:
        # Whoever computes a span leaves its pads out: that block would be published unwritten.
        raise MalformedSpansError("A span ends in a whole block of pad tokens", first)
