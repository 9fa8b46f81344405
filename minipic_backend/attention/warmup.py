"""Compiles the kernels of a layer's shape before the first request needs them."""

from __future__ import annotations

import torch
from torch import Tensor

from minipic_backend.attention.compact import Attend, plan_compact
from minipic_backend.attention.dispatch import (
    SpanWork,
    max_compact_keys,
    plan_dependent,
    run_dependent,
)
from minipic_backend.attention.geometry import AttentionShape, choose_geometry
from minipic_backend.attention.rotary import Rotary
from minipic_backend.attention.rows import PlacedRun, Run, SeenSegment
from minipic_backend.spans.segments import SegmentKind

__all__ = ["query_lengths", "warm_up"]

_ROW_COUNTS = (1, 65, 257)
"""One of each size that the planning kernels are compiled for (`work._bucket`)."""


def query_lengths(shape: AttentionShape) -> list[int]:
    """Queries per row, one for each set of block sizes that `choose_geometry` gives."""
    lengths, seen = [], set()
    length = 1
    while length <= 128:
        geometry = choose_geometry(shape, length)
        if geometry not in seen:
            seen.add(geometry)
            lengths.append(length)
        length *= 2
    return lengths


def warm_up(
    shape: AttentionShape,
    key_cache: Tensor,
    value_cache: Tensor,
    rotary: Rotary,
    *,
    dtype: torch.dtype,
    query_dtype: torch.dtype | None = None,
    max_rows: int,
    max_tokens: int,
    scale: float,
    soft_cap: float = 0.0,
    attend: Attend | None = None,
) -> int:
    """Runs every kernel that a batch may need, over whatever the first blocks hold.

    Args:
        shape: of the layer.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size], at least four blocks.
        value_cache: the same.
        rotary: of the layer, on the cache's device.
        dtype: of outputs.
        query_dtype: of queries, if it is another.
        max_rows: requests of a batch, at most.
        max_tokens: tokens of a batch, at most.
        scale: factor on the scores.
        soft_cap: of the scores; 0 for none.
        attend: the varlen attention, if the layer has one (see `compact`).

    Returns:
        How many batches were run.
    """
    device, size = key_cache.device, shape.block_size
    count = 0
    lengths = query_lengths(shape)
    for length, num_rows in [*((n, 1) for n in lengths), *((1, n) for n in _ROW_COUNTS[1:])]:
        if num_rows > max_rows or num_rows * length > max_tokens:
            continue
        runs = [_run(row, row * length, length, size) for row in range(num_rows)]
        num_blocks = 2 + -(-length // size)
        table = torch.arange(num_blocks, dtype=torch.int32, device=device)
        table = table.clamp(max=key_cache.shape[0] - 1).repeat(num_rows, 1)
        out = torch.zeros(
            (num_rows * length, shape.num_heads, shape.head_size), dtype=dtype, device=device
        )
        query = torch.zeros_like(out).to(query_dtype or dtype)
        works = [plan_dependent(runs, table, shape)]
        # Its kernel knows neither rows nor queries: once is enough.
        if attend is not None and count == 0 and not shape.unrotated:
            works.append(SpanWork((), plan_compact(runs, table, max_compact_keys(shape)), False))
        for work in works:
            run_dependent(
                work, query, key_cache, value_cache, rotary, out, scale=scale, soft_cap=soft_cap,
                attend=attend,
            )  # fmt: skip
            count += 1
    return count


def _run(row: int, query: int, length: int, size: int) -> PlacedRun:
    """`length` queries behind two segments of a block each, the second one shifted."""
    start = 2 * size
    seen = (
        SeenSegment(0, size, 0, 0),
        SeenSegment(size, 2 * size, 1, 0),
        SeenSegment(start, start + length, 0, 0),
    )
    run = Run(SegmentKind.DEPENDENT, start, start + length, start, 0, seen)
    return PlacedRun(row, query, run)
