"""Compiles the kernels of a layer's shape before the first request needs them."""

from __future__ import annotations

import torch
from torch import Tensor

from minipic_backend.attention.compact import Attend, plan_compact
from minipic_backend.attention.compiling import compile_together
from minipic_backend.attention.dispatch import (
    SpanWork,
    max_compact_keys,
    plan_dependent,
    run_dependent,
)
from minipic_backend.attention.geometry import AttentionShape, choose_geometry
from minipic_backend.attention.kernels.compact import compact_kernel
from minipic_backend.attention.kernels.merge import merge_kernel
from minipic_backend.attention.kernels.span_local import span_local_kernel
from minipic_backend.attention.kernels.unrotated import unrotated_kernel
from minipic_backend.attention.kernels.work import items_kernel, pieces_kernel
from minipic_backend.attention.rotary import Rotary
from minipic_backend.attention.rows import PlacedRun, QueryRows, RowSegments, Run, SeenSegment
from minipic_backend.attention.work import WorkPlan, bucket_sizes, plan_work
from minipic_backend.spans.segments import SegmentKind

__all__ = ["KERNELS", "most_items", "most_rows", "query_lengths", "warm_up"]

KERNELS = (
    items_kernel,
    pieces_kernel,
    span_local_kernel,
    unrotated_kernel,
    merge_kernel,
    compact_kernel,
)
"""All that a batch may launch."""


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


def most_rows(shape: AttentionShape, max_reqs: int, max_tokens: int) -> int:
    """Runs that a batch has at most: segments are whole blocks, but where a chunk cuts them."""
    return min(2 * max_reqs + max_tokens // shape.block_size, max_tokens)


def most_items(shape: AttentionShape, max_reqs: int, max_tokens: int) -> int:
    """Items that a batch has at most (`work`)."""
    block_m = min(choose_geometry(shape, n).block_m for n in query_lengths(shape))
    num_tiles = max_tokens // (block_m // shape.group)
    return min(most_rows(shape, max_reqs, max_tokens) + num_tiles, max_tokens)


def warm_up(
    shape: AttentionShape,
    key_cache: Tensor,
    value_cache: Tensor,
    rotary: Rotary,
    *,
    dtype: torch.dtype,
    query_dtype: torch.dtype | None = None,
    max_reqs: int,
    max_tokens: int,
    scale: float,
    soft_cap: float = 0.0,
    attend: Attend | None = None,
) -> int:
    """Runs every kernel that a batch may need, over whatever the first blocks hold.

    They are compiled side by side first, then run.

    Args:
        shape: of the layer.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size], at least four blocks.
        value_cache: the same.
        rotary: of the layer, on the cache's device.
        dtype: of outputs.
        query_dtype: of queries, if it is another.
        max_reqs: requests of a batch, at most.
        max_tokens: tokens of a batch, at most.
        scale: factor on the scores.
        soft_cap: of the scores; 0 for none.
        attend: the varlen attention, if the layer has one (see `compact`).

    Returns:
        How many compilations were made side by side; 0 under Triton's interpreter.
    """
    device, size = key_cache.device, shape.block_size
    num_rows = most_rows(shape, max_reqs, max_tokens)
    lengths = [n for n in query_lengths(shape) if n <= max_tokens]

    def attention(length: int, attend: Attend | None) -> None:
        table = torch.arange(2 + -(-length // size), dtype=torch.int32, device=device)
        table = table.clamp(max=key_cache.shape[0] - 1)[None]
        runs = [_run(length, size)]
        if attend is None:
            work = plan_dependent(runs, table, shape)
        else:
            work = SpanWork((), plan_compact(runs, table, max_compact_keys(shape)), False)
        out = torch.zeros((length, shape.num_heads, shape.head_size), dtype=dtype, device=device)
        query = torch.zeros_like(out).to(query_dtype or dtype)
        run_dependent(
            work, query, key_cache, value_cache, rotary, out, scale=scale, soft_cap=soft_cap,
            attend=attend,
        )  # fmt: skip

    def everything(attend: Attend | None) -> None:
        for length in lengths:
            attention(length, None)
        if attend is not None:
            attention(lengths[-1], attend)
        for num_items in bucket_sizes(most_items(shape, max_reqs, max_tokens)):
            _plan(min(num_items, num_rows), num_items, device)

    if shape.unrotated:
        attend = None
    count = compile_together(KERNELS, lambda: everything(attend and _attend_to_nothing))
    everything(attend)
    return count


def _run(length: int, size: int) -> PlacedRun:
    """`length` queries behind two segments of a block each, the second one shifted."""
    start = 2 * size
    seen = (
        SeenSegment(0, size, 0, 0),
        SeenSegment(size, 2 * size, 1, 0),
        SeenSegment(start, start + length, 0, 0),
    )
    return PlacedRun(0, 0, Run(SegmentKind.DEPENDENT, start, start + length, start, 0, seen))


def _plan(num_rows: int, num_items: int, device: torch.device) -> None:
    """Plans rows that have no queries: sizes matter here, not what they hold."""
    nothing = torch.zeros(num_rows, dtype=torch.int32, device=device)
    rows = QueryRows(nothing, nothing, nothing, nothing[:, None], 1, num_items)
    segments = RowSegments.pack([(SeenSegment(0, 1, 0, 0),)] * num_rows, device)
    plan_work(WorkPlan.allocate(num_rows, num_items, 2, 1, 16, device=device), rows, segments)


def _attend_to_nothing(**arguments: object) -> None:
    """Stands in for `attend` where nothing is run."""
