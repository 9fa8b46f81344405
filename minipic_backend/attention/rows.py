"""What a kernel is told: rows of queries, and the segments of the cache that each row sees.

A row is a run of consecutive tokens of one request that see the cache in the same way: tokens of
one segment. All a kernel knows of spans is

    row r sees token j of its request  iff  start[s] <= j < end[s] for one of its segments s,
                                            and j <= the query

so that frames, pads and markers are settled here, once, for every kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minipic_backend.spans.segments import Segment, SegmentKind, SegmentTable

__all__ = [
    "OPEN_END",
    "PlacedRun",
    "QueryRows",
    "RowSegments",
    "Run",
    "SeenSegment",
    "split_runs",
    "upload",
]

OPEN_END = 2**31 - 1
"""`end` of a segment that is still growing; the query bounds it."""


@dataclass(frozen=True, slots=True)
class SeenSegment:
    """Tokens [start, end) of a request as one of its rows sees them.

    Args:
        start: first visible token.
        end: behind the last visible token (pads are not), or `OPEN_END`.
        shift: position under which the row sees a key, minus its cached position.
        base: position under which the row sees token j, minus j.
    """

    start: int
    end: int
    shift: int
    base: int


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of one request and one segment.

    Args:
        kind: of the segment. Generated tokens are dependent ones.
        start: index of the first token in its request.
        end: index behind the last token.
        segment_start: index of the first token of the run's own segment.
        num_frame_tokens: of a span: tokens of its frame; else 0.
        seen: in order; the run's own segment is the last.
    """

    kind: SegmentKind
    start: int
    end: int
    segment_start: int
    num_frame_tokens: int
    seen: tuple[SeenSegment, ...]

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PlacedRun:
    """A run in a batch.

    Args:
        request: row of its request in the block table.
        query: index of its first query in the batch.
        run: the run.
    """

    request: int
    query: int
    run: Run


def split_runs(table: SegmentTable | None, start: int, end: int) -> list[Run]:
    """The runs of tokens [start, end) of one request; None is a prompt without segments."""
    if table is None:
        own = SeenSegment(0, OPEN_END, 0, 0)
        return [Run(SegmentKind.PREFIX, start, end, 0, 0, (own,))] if start < end else []
    runs = []
    for index, segment in enumerate(_with_generated(table)):
        lo, hi = max(segment.start, start), min(segment.end, end)
        if lo >= hi:
            continue
        is_span = segment.kind is SegmentKind.SPAN
        frame = table.num_frame_tokens if is_span else 0
        seen = _seen_by_span(segment, frame) if is_span else _seen_by(table, index, segment)
        runs.append(Run(segment.kind, lo, hi, segment.start, frame, seen))
    return runs


def _with_generated(table: SegmentTable) -> list[Segment]:
    """The prompt's segments, generated tokens included: they lengthen the last one, or behind a
    lone span are a dependent segment of their own."""
    segments = list(table.segments)
    if table.last.kind is SegmentKind.SPAN:
        position = table.generated_position
        begin = table.num_prompt_tokens
        segments.append(Segment(SegmentKind.DEPENDENT, begin, OPEN_END, 0, position, position))
    else:
        segments[-1] = replace(segments[-1], end=OPEN_END, num_pads=0)
    return segments


def _seen_by(table: SegmentTable, index: int, own: Segment) -> tuple[SeenSegment, ...]:
    """What a prefix or dependent segment sees: parts of those in front of it, and itself."""
    before = [
        SeenSegment(start, end, segment.shift, segment.offset - segment.start)
        for segment, start, end in table.seen_before(index)
    ]
    last = SeenSegment(own.start, own.end - own.num_pads, own.shift, own.offset - own.start)
    return (*before, last)


def _seen_by_span(span: Segment, num_frame_tokens: int) -> tuple[SeenSegment, ...]:
    own = SeenSegment(span.start, span.end, 0, span.cached_position - span.start)
    return (SeenSegment(0, num_frame_tokens, 0, 0), own) if num_frame_tokens else (own,)


@dataclass(frozen=True, slots=True)
class QueryRows:
    """Rows of a batch, on the device. All tensors int32; fixed shapes, for CUDA graphs.

    Args:
        query_start: [num_rows], the row's first query in the packed batch.
        query_end: [num_rows]; equal to query_start where a row is padding.
        seq_lens: [num_rows], tokens of the request up to and including the row's last query.
        block_table: [num_rows, max_blocks].
        max_query_len: upper bound of queries in a row, known on the host.
        num_tokens: upper bound of queries in all rows, known on the host.
    """

    query_start: Tensor
    query_end: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_query_len: int
    num_tokens: int

    @property
    def num_rows(self) -> int:
        return int(self.query_start.shape[0])


@dataclass(frozen=True, slots=True)
class RowSegments:
    """Segments of all rows, packed, on the device. All tensors int32.

    Those of row r are [first[r], last[r]) of the arrays behind; starts and ends do not fall.

    Args:
        first: [num_rows].
        last: [num_rows].
        start: [capacity], see `SeenSegment`; likewise `end`, `shift` and `base`.
    """

    first: Tensor
    last: Tensor
    start: Tensor
    end: Tensor
    shift: Tensor
    base: Tensor

    @classmethod
    def pack(
        cls, rows: Sequence[Sequence[SeenSegment]], device: torch.device | str = "cpu"
    ) -> RowSegments:
        """From the segments of each row, with one copy to the device."""
        flat = [(s.start, s.end, s.shift, s.base) for row in rows for s in row] or [(0, 0, 0, 0)]
        offsets = np.cumsum([0] + [len(row) for row in rows], dtype=np.int32)
        fields = np.asarray(flat, dtype=np.int32).T
        packed = upload(np.concatenate((offsets, fields.ravel())), torch.device(device))
        offsets_on_device, rest = packed[: len(offsets)], packed[len(offsets) :]
        start, end, shift, base = rest.view(4, -1).unbind(0)
        return cls(offsets_on_device[:-1], offsets_on_device[1:], start, end, shift, base)


def upload(values: NDArray[np.integer], device: torch.device) -> Tensor:
    """As int32 on the device, without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
