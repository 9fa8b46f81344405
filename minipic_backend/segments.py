"""The segments of a prompt, read from its token ids alone.

    [prefix … newline pads][SSep doc1 … pads][SSep doc2 … pads][PDep question …]

A marker counts only as the first token of a block. Everything that the engine does differently
for spans (hashes, positions, attention) follows from the table made here, so that client,
scheduler and worker cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from minipic_backend.config import SpanConfig, SpanOptions
from minipic_backend.errors import MalformedSpansError

__all__ = ["Segment", "SegmentKind", "SegmentTable", "parse_segments"]


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
    """

    kind: SegmentKind
    start: int
    end: int
    num_pads: int
    offset: int
    cached_position: int

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
        """Whether later tokens see token i, for i in [start, end); bool, [end - start].

        Pads are hidden; so are the SSep tokens unless `options.see_markers`.
        """
        result = np.ones(end - start, dtype=np.bool_)
        for segment in self.segments:
            if segment.num_pads:
                _fill(result, start, segment.end - segment.num_pads, segment.end)
            if segment.kind is SegmentKind.SPAN and not self.options.see_markers:
                _fill(result, start, segment.start, segment.start + 1)
        return result

    @property
    def generated_position(self) -> int:
        """Logical (and cached) position of the first generated token."""
        return self.last.offset + self.last.num_tokens - self.last.num_pads

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
        options: frame, offsets and marker visibility.

    Raises:
        MalformedSpansError: a marker inside a block, a pad before the end of a segment or in the
            prefix or at the end of the prompt, or a prompt of several segments that ends in a
            span.
    """
    tokens = np.asarray(token_ids, dtype=np.int64)
    is_marker = (tokens == config.ssep) | (tokens == config.pdep)
    starts = np.flatnonzero(is_marker)
    if starts.size == 0:
        return None
    misplaced = starts[starts % config.block_size != 0]
    if misplaced.size:
        index = int(misplaced[0])
        raise MalformedSpansError(
            f"Marker token {int(tokens[index])} stands inside a block; markers start a block of "
            f"{config.block_size} tokens",
            index,
        )
    bounds = [int(start) for start in starts]
    if bounds[0] != 0:
        bounds.insert(0, 0)
    bounds.append(len(tokens))

    segments: list[Segment] = []
    offset = 0
    num_frame_tokens = 0
    for start, end in pairwise(bounds):
        kind = _kind(int(tokens[start]), config)
        num_pads = _num_trailing_pads(tokens, start, end, kind, config, is_last=end == bounds[-1])
        if options.offsets == "padded":
            offset = start
        if kind is SegmentKind.PREFIX and options.frame == "prefix":
            num_frame_tokens = end
        cached_position = num_frame_tokens if kind is SegmentKind.SPAN else offset
        segments.append(Segment(kind, start, end, num_pads, offset, cached_position))
        offset += end - start - num_pads
    if len(segments) > 1 and segments[-1].kind is SegmentKind.SPAN:
        raise MalformedSpansError(
            "A prompt of several segments ends in a span; end it with a dependent segment",
            segments[-1].start,
        )
    return SegmentTable(tuple(segments), len(tokens), options)


def _kind(first_token: int, config: SpanConfig) -> SegmentKind:
    if first_token == config.ssep:
        return SegmentKind.SPAN
    return SegmentKind.DEPENDENT if first_token == config.pdep else SegmentKind.PREFIX


def _num_trailing_pads(
    tokens: NDArray[np.int64],
    start: int,
    end: int,
    kind: SegmentKind,
    config: SpanConfig,
    *,
    is_last: bool,
) -> int:
    """Pads at the end of tokens[start:end]; refuses pads anywhere else."""
    is_pad = tokens[start:end] == config.pad
    if not is_pad.any():
        return 0
    first_pad = int(np.argmax(is_pad))
    num_pads = int(is_pad.sum())
    if kind is SegmentKind.PREFIX:
        raise MalformedSpansError(
            "The pad token stands in the prefix, whose pads are ordinary tokens", start + first_pad
        )
    if num_pads != end - start - first_pad:
        raise MalformedSpansError(
            "A pad token stands before the end of a segment", start + first_pad
        )
    if is_last and kind is SegmentKind.DEPENDENT:
        raise MalformedSpansError("The prompt ends in pad tokens", start + first_pad)
    return num_pads
