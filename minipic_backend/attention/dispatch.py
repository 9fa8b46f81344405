"""Which kernel computes what, with which block sizes.

    queries of a row x heads of a group
        <= 16   paged kernel, tiles of 16 rows: decode, limited by memory
        more    paged kernel, tiles of 32, 64 or 128 rows; or copies of the queries through a stock
                varlen attention (`virtual`), if it may be used and the estimate below favours it;
                an fp8 cache stays with the paged kernel: turned queries would be rounded to fp8
                a second time

    paged    max(flops / PAGED_FLOPS, reading) + PAGED_SECONDS
    virtual  max(flops / STOCK_FLOPS, reading) + copies / BYTES_PER_SECOND + VIRTUAL_SECONDS

    flops    4 * rows, rounded up to a tile, * keys seen * head size
    reading  bytes of the keys and values seen / BYTES_PER_SECOND
    copies   bytes of queries * segments seen, twice written and read (turned, partial outputs)

The constants are for one H200; `benchmarks/kernels.py` measures what they stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minipic_backend.attention.geometry import (
    AttentionShape,
    Geometry,
    choose_geometry,
    choose_num_workers,
)
from minipic_backend.attention.rotary import Rotary
from minipic_backend.attention.rows import PlacedRun, QueryRows, RowSegments, upload
from minipic_backend.attention.sequences import joined
from minipic_backend.attention.span_local import span_local_attention
from minipic_backend.attention.unrotated import unrotated_attention
from minipic_backend.attention.virtual import Attend, VirtualPlan, plan_virtual, virtual_attention
from minipic_backend.attention.work import WorkPlan, plan_work

__all__ = [
    "PagedWork",
    "SpanWork",
    "graph_work",
    "max_copies",
    "plan_dependent",
    "prefers_virtual",
    "refresh_graph_work",
    "run_dependent",
]

PAGED_FLOPS = 220e12
STOCK_FLOPS = 550e12
BYTES_PER_SECOND = 3.5e12
PAGED_SECONDS = 40e-6
VIRTUAL_SECONDS = 150e-6
"""What a layer costs beyond its arithmetic, on the device and, the larger part for `virtual` with
its four launches, on the host: a step of few tokens waits for the host, not for the device."""

COPY_BUFFER_BYTES = 256 << 20
"""Room for turned queries and their partial outputs; more queries take several passes."""

MIN_SHARE = 256
"""Keys below which a worker's share is not cut further."""


@dataclass(frozen=True, slots=True)
class PagedWork:
    """Rows of like length for a paged kernel."""

    rows: QueryRows
    segments: RowSegments
    plan: WorkPlan
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class SpanWork:
    """What a batch needs beyond stock attention, for all layers of one shape."""

    paged: tuple[PagedWork, ...]
    virtual: VirtualPlan | None
    unrotated: bool


def prefers_virtual(shape: AttentionShape, runs: Sequence[PlacedRun]) -> bool:
    """Whether the estimate at the top favours copies of the queries for these runs."""
    longest = max(placed.run.num_tokens for placed in runs)
    block_m = choose_geometry(shape, longest).block_m
    paged_flops = stock_flops = num_keys = num_copies = 0
    for placed in runs:
        run = placed.run
        seen = joined(run.seen)
        keys = sum(min(s.end, run.end) - s.start for s in seen)
        rows = run.num_tokens * shape.group
        flops_per_row = 4 * keys * shape.num_kv_heads * shape.head_size
        paged_flops += _round_up(rows, block_m) * flops_per_row
        stock_flops += _round_up(rows, 128) * flops_per_row
        num_keys += keys
        num_copies += run.num_tokens * len(seen)
    head_bytes = shape.head_size * shape.itemsize
    reading = 2 * num_keys * shape.num_kv_heads * head_bytes / BYTES_PER_SECOND
    copies = 4 * num_copies * shape.num_heads * head_bytes / BYTES_PER_SECOND
    virtual = max(stock_flops / STOCK_FLOPS, reading) + copies + VIRTUAL_SECONDS
    return virtual < max(paged_flops / PAGED_FLOPS, reading) + PAGED_SECONDS


def max_copies(shape: AttentionShape) -> int:
    """Copies of a query that `COPY_BUFFER_BYTES` have room for, each with its partial output."""
    return max(COPY_BUFFER_BYTES // (2 * shape.num_heads * shape.head_size * shape.itemsize), 1)


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def plan_dependent(
    runs: Sequence[PlacedRun], block_table: Tensor, shape: AttentionShape, *, virtual: bool = False
) -> SpanWork:
    """Plans a batch's runs, once per step for all layers; uploads, but never waits.

    Args:
        runs: dependent ones; with `shape.unrotated`, all.
        block_table: [num_requests, max_blocks], int32, on the device.
        shape: of the layers.
        virtual: a varlen attention will be handed to `run_dependent`: 16-bit cache, segments that
            start at a block (markers seen).
    """
    few = [r for r in runs if r.run.num_tokens * shape.group <= 16]
    many = [r for r in runs if r.run.num_tokens * shape.group > 16]
    plan: VirtualPlan | None = None
    if virtual and many and not (shape.unrotated or shape.window):
        starts = {s.start for r in many for s in r.run.seen}
        if all(start % shape.block_size == 0 for start in starts) and prefers_virtual(shape, many):
            plan = plan_virtual(many, block_table, shape.block_size, max_copies(shape))
            many = []
    paged = tuple(_paged_work(part, block_table, shape) for part in (few, many) if part)
    return SpanWork(paged, plan, shape.unrotated)


def run_dependent(
    work: SpanWork,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rotary: Rotary,
    out: Tensor,
    *,
    scale: float,
    soft_cap: float = 0.0,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    attend: Attend | None = None,
) -> Tensor:
    """Attention of one layer for the planned queries; arguments as in `span_local_attention`."""
    kernel = unrotated_attention if work.unrotated else span_local_attention
    for part in work.paged:
        kernel(
            query, key_cache, value_cache, part.rows, part.segments, part.plan, rotary, out,
            scale=scale, soft_cap=soft_cap, q_scale=q_scale, k_scale=k_scale,
            v_scale=v_scale, geometry=part.geometry,
        )  # fmt: skip
    if work.virtual is not None:
        if attend is None:
            raise ValueError("This batch was planned for a varlen attention")
        virtual_attention(
            query, key_cache, value_cache, work.virtual, rotary, out, attend, scale=scale,
            soft_cap=soft_cap,
        )  # fmt: skip
    return out


def graph_work(
    max_num_reqs: int,
    device: torch.device,
    *,
    max_query_len: int = 1,
    unrotated: bool,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    itemsize: int = 2,
) -> SpanWork:
    """Buffers at fixed addresses for decode batches of up to `max_num_reqs` requests.

    `refresh_graph_work` fills them before a CUDA graph is captured or replayed.
    """
    shape = AttentionShape(num_heads, num_kv_heads, head_size, block_size, itemsize, unrotated)
    geometry = choose_geometry(shape, max_query_len)
    plan = _allocate(shape, geometry, max_num_reqs, max_num_reqs * max_query_len, device)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    rows = QueryRows(nothing, nothing, nothing, nothing[None], max_query_len, 0)
    segments = RowSegments(nothing, nothing, nothing, nothing, nothing, nothing)
    return SpanWork((PagedWork(rows, segments, plan, geometry),), None, unrotated)


def refresh_graph_work(work: SpanWork, rows: QueryRows, segments: RowSegments) -> SpanWork:
    """Plans a decode batch inside the buffers of `work`: equal batch sizes, equal addresses.

    Args:
        work: of `graph_work`.
        rows: at fixed addresses; padded rows have no queries.
        segments: at fixed addresses.
    """
    (part,) = work.paged
    plan = part.plan.narrowed(rows.num_rows, rows.num_tokens)
    plan_work(plan, rows, segments, MIN_SHARE)
    return SpanWork((PagedWork(rows, segments, plan, part.geometry),), None, work.unrotated)


def _paged_work(runs: Sequence[PlacedRun], block_table: Tensor, shape: AttentionShape) -> PagedWork:
    device = block_table.device
    lengths = [placed.run.num_tokens for placed in runs]
    values = np.array(
        [
            (placed.query, placed.query + n, placed.run.end, placed.request)
            for placed, n in zip(runs, lengths, strict=True)
        ],
        dtype=np.int32,
    )
    query_start, query_end, seq_lens, requests = upload(values.T, device).unbind(0)
    rows = QueryRows(
        query_start,
        query_end,
        seq_lens,
        block_table.index_select(0, requests),
        max(lengths),
        sum(lengths),
    )
    segments = RowSegments.pack([placed.run.seen for placed in runs], device)
    geometry = choose_geometry(shape, rows.max_query_len)
    plan = _allocate(shape, geometry, rows.num_rows, rows.num_tokens, device)
    plan_work(plan, rows, segments, MIN_SHARE)
    return PagedWork(rows, segments, plan, geometry)


def _allocate(
    shape: AttentionShape,
    geometry: Geometry,
    max_rows: int,
    max_tokens: int,
    device: torch.device,
) -> WorkPlan:
    return WorkPlan.allocate(
        max_rows,
        max_tokens,
        choose_num_workers(shape, geometry, _num_sms(device)),
        geometry.block_m // shape.group,
        geometry.block_n,
        shape.window,
        device,
    )


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count
