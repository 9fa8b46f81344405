"""Which kernel computes what, with which block sizes.

    queries of a row x heads of a group
        <= 16   paged kernel, tiles of 16 rows: decode, limited by memory
        more    paged kernel, tiles of 32, 64 or 128 rows; or a stock varlen attention over copies
                of the keys (`compact`), if it may be used and the estimate below favours it; an
                fp8 cache stays with the paged kernel: turned keys would be rounded a second time

    paged    max(flops / PAGED_FLOPS, reading)
    compact  max(flops / STOCK_FLOPS, reading) + copies / BYTES_PER_SECOND

    flops    4 * rows, rounded up to a tile, * keys seen * head size
    reading  bytes of the keys and values seen / BYTES_PER_SECOND
    copies   the same bytes, read and written once more

The constants are for one H200; `benchmarks/kernels.py` measures what they stand for.

A step of few tokens may be one CUDA graph, whatever its rows are; its kernel is the paged one. The
host launches it once instead of several kernels a layer, which takes it longer than the device
needs for them (`suits_graph`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minipic_backend.attention.compact import (
    Attend,
    CompactPass,
    compact_attention,
    num_seen,
    plan_compact,
)
from minipic_backend.attention.geometry import (
    AttentionShape,
    Geometry,
    choose_geometry,
    choose_num_workers,
)
from minipic_backend.attention.rotary import Rotary
from minipic_backend.attention.rows import PlacedRun, QueryRows, RowSegments, upload
from minipic_backend.attention.span_local import span_local_attention
from minipic_backend.attention.unrotated import unrotated_attention
from minipic_backend.attention.work import WorkPlan, plan_work

__all__ = [
    "QUESTION_SIZES",
    "PagedWork",
    "SpanWork",
    "graph_work",
    "max_compact_keys",
    "plan_dependent",
    "prefers_compact",
    "refresh_graph_work",
    "run_dependent",
    "suits_graph",
]

PAGED_FLOPS = 220e12
STOCK_FLOPS = 550e12
BYTES_PER_SECOND = 3.5e12

COMPACT_BUFFER_BYTES = 512 << 20
"""Room for the copies of a pass: 131,072 tokens of an 8B Llama. More keys take several passes; a
request that sees more stays with the paged kernel."""

MIN_SHARE = 256
"""Keys below which a worker's share is not cut further."""

QUESTION_SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
"""Tokens of the steps that CUDA graphs are captured for, beside those of decode."""

GRAPH_KEYS = 1 << 16
"""Keys that the tiles of such a step meet, at most: more, and the paged kernel costs as much as the
graph saves."""


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
    compact: tuple[CompactPass, ...]
    unrotated: bool


def prefers_compact(shape: AttentionShape, runs: Sequence[PlacedRun]) -> bool:
    """Whether the estimate at the top favours copies of the keys for these runs."""
    longest = max(placed.run.num_tokens for placed in runs)
    block_m = choose_geometry(shape, longest).block_m
    paged_flops = stock_flops = num_keys = 0
    for placed in runs:
        keys = num_seen(placed.run)
        rows = placed.run.num_tokens * shape.group
        flops_per_row = 4 * keys * shape.num_kv_heads * shape.head_size
        paged_flops += _round_up(rows, block_m) * flops_per_row
        stock_flops += _round_up(rows, 128) * flops_per_row
        num_keys += keys
    reading = num_keys * _bytes_per_token(shape) / BYTES_PER_SECOND
    compact = max(stock_flops / STOCK_FLOPS, reading) + 2 * reading
    return compact < max(paged_flops / PAGED_FLOPS, reading)


def suits_graph(shape: AttentionShape, counts: Sequence[int], starts: Sequence[int]) -> bool:
    """Whether a step is to be one CUDA graph, with the paged kernel for every row.

    Args:
        shape: of the layers.
        counts: tokens of each request.
        starts: tokens of each in front of them.
    """
    num_tokens = sum(counts)
    if num_tokens > QUESTION_SIZES[-1]:
        return False
    block_m = choose_geometry(shape, num_tokens).block_m
    tiles = (_round_up(count * shape.group, block_m) // block_m for count in counts)
    keys = (start + count for start, count in zip(starts, counts, strict=True))
    return sum(t * k for t, k in zip(tiles, keys, strict=True)) <= GRAPH_KEYS


def max_compact_keys(shape: AttentionShape, free_bytes: int | None = None) -> int:
    """Keys, with their values, that there is room to copy.

    Args:
        shape: of the layers.
        free_bytes: of the device, once everything else has its memory: half of them may go to
            copies. None: plenty.
    """
    room = COMPACT_BUFFER_BYTES
    if free_bytes is not None:
        room = min(room, free_bytes // 2)
    return room // _bytes_per_token(shape)


def _bytes_per_token(shape: AttentionShape) -> int:
    return 2 * shape.num_kv_heads * shape.head_size * shape.itemsize


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def plan_dependent(
    runs: Sequence[PlacedRun], block_table: Tensor, shape: AttentionShape, *, max_keys: int = 0
) -> SpanWork:
    """Plans a batch's runs, once per step for all layers; uploads, but never waits.

    Args:
        runs: dependent ones; with `shape.unrotated`, all.
        block_table: [num_requests, max_blocks], int32, on the device.
        shape: of the layers.
        max_keys: keys that copies have room for, if a varlen attention will be handed to
            `run_dependent` and the cache has the dtype of the queries; else 0.
    """
    few = [r for r in runs if r.run.num_tokens * shape.group <= 16]
    many = [r for r in runs if r.run.num_tokens * shape.group > 16]
    passes: tuple[CompactPass, ...] = ()
    if max_keys and many and not (shape.unrotated or shape.window):
        fitting: list[PlacedRun] = []
        others: list[PlacedRun] = []
        for placed in many:
            (fitting if num_seen(placed.run) <= max_keys else others).append(placed)
        if fitting and prefers_compact(shape, fitting):
            passes = plan_compact(fitting, block_table, max_keys)
            many = others
    paged = tuple(_paged_work(part, block_table, shape) for part in (few, many) if part)
    return SpanWork(paged, passes, shape.unrotated)


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
    if work.compact:
        if attend is None:
            raise ValueError("This batch was planned for a varlen attention")
        compact_attention(
            query, key_cache, value_cache, work.compact, rotary, out, attend, scale=scale,
            soft_cap=soft_cap,
        )  # fmt: skip
    return out


def graph_work(
    shape: AttentionShape,
    max_rows: int,
    device: torch.device,
    *,
    max_query_len: int = 1,
) -> SpanWork:
    """Buffers at fixed addresses for batches of up to `max_rows` tokens, and as many rows.

    `refresh_graph_work` fills them before a CUDA graph is captured or replayed.

    Args:
        shape: of the layers.
        max_rows: rows and tokens of a batch, at most.
        device: of the tensors.
        max_query_len: queries of a row, at most.
    """
    geometry = choose_geometry(shape, max_query_len)
    plan = _allocate(shape, geometry, max_rows, max_rows, device)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    rows = QueryRows(nothing, nothing, nothing, nothing[None], max_query_len, 0)
    segments = RowSegments(nothing, nothing, nothing, nothing, nothing, nothing)
    return SpanWork((PagedWork(rows, segments, plan, geometry),), (), shape.unrotated)


def refresh_graph_work(work: SpanWork, rows: QueryRows, segments: RowSegments) -> SpanWork:
    """Plans a batch inside the buffers of `work`, whose addresses stay.

    Args:
        work: of `graph_work`.
        rows: with a block table at a fixed address; padded rows have no queries.
        segments: at fixed addresses.
    """
    (part,) = work.paged
    plan = part.plan.narrowed(rows.num_rows, rows.num_tokens)
    plan_work(plan, rows, segments, MIN_SHARE)
    return SpanWork((PagedWork(rows, segments, plan, part.geometry),), (), work.unrotated)


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
