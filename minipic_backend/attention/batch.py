"""Splits a batch's queries into rows that each see one run of keys.

A *context row* is an ordinary causal sequence over its own blocks: an ordinary request, a chunk of
a prefix, or a chunk of one span behind its frame (frame blocks, then span blocks). Stock kernels
serve it. A *dependent row* sees everything in front of it, over several segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minipic_backend.segments import SegmentKind, SegmentTable

__all__ = ["BatchRows", "ContextRow", "DependentRow", "split_batch"]


@dataclass(frozen=True, slots=True)
class ContextRow:
    """Queries [query_start, query_start + num_queries) of the batch: the last of `num_keys` keys.

    Args:
        request: index of the request in the batch.
        query_start: index of the first query in the batch.
        num_queries: queries of this row.
        blocks: ranges [lo, hi) of the request's block table that hold the keys, in order.
        num_keys: keys in those blocks, counted from the first; their cached positions are
            0 … num_keys - 1.
    """

    request: int
    query_start: int
    num_queries: int
    blocks: tuple[tuple[int, int], ...]
    num_keys: int


@dataclass(frozen=True, slots=True)
class DependentRow:
    """Queries of dependent tokens [start, end) of one request; they see tokens [0, i].

    Args:
        request: index of the request in the batch.
        query_start: index of the first query in the batch.
        start: index of the first query's token in the request.
        end: index behind the last one.
        table: the request's segments.
    """

    request: int
    query_start: int
    start: int
    end: int
    table: SegmentTable

    @property
    def num_queries(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class BatchRows:
    context: tuple[ContextRow, ...]
    dependent: tuple[DependentRow, ...]


def split_batch(
    tables: Sequence[SegmentTable | None],
    num_computed: Sequence[int],
    num_scheduled: Sequence[int],
    block_size: int,
) -> BatchRows:
    """Rows of a batch, in the order of its tokens.

    Args:
        tables: segments of each request; None for an ordinary prompt.
        num_computed: tokens of each request already in the cache.
        num_scheduled: tokens of each request in this batch.
        block_size: tokens in a block.
    """
    context: list[ContextRow] = []
    dependent: list[DependentRow] = []
    query = 0
    for request, table in enumerate(tables):
        start = int(num_computed[request])
        end = start + int(num_scheduled[request])
        for lo, hi, first, is_dependent, frame in _pieces(table, start, end):
            at = query + lo - start
            if is_dependent:
                assert table is not None
                dependent.append(DependentRow(request, at, lo, hi, table))
                continue
            blocks: tuple[tuple[int, int], ...] = ((first // block_size, -(-hi // block_size)),)
            if frame:
                blocks = ((0, frame // block_size), *blocks)
            context.append(ContextRow(request, at, hi - lo, blocks, frame + hi - first))
        query += end - start
    return BatchRows(tuple(context), tuple(dependent))


def _pieces(
    table: SegmentTable | None, start: int, end: int
) -> list[tuple[int, int, int, bool, int]]:
    """Tokens [start, end) cut at segment borders: (lo, hi, first key, is dependent, frame)."""
    if table is None:
        return [(start, end, 0, False, 0)]
    pieces: list[tuple[int, int, int, bool, int]] = []
    for segment in table.segments:
        lo, hi = max(start, segment.start), min(end, segment.end)
        if lo >= hi:
            continue
        frame = table.num_frame_tokens if segment.kind is SegmentKind.SPAN else 0
        is_dependent = segment.kind is SegmentKind.DEPENDENT
        pieces.append((lo, hi, segment.start, is_dependent, frame))
    if end > table.num_prompt_tokens:
        lo = max(start, table.num_prompt_tokens)
        pieces.append((lo, end, 0, table.last.kind is not SegmentKind.PREFIX, 0))
    return pieces
