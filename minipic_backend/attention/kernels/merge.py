# mypy: ignore-errors
# Reason: Triton kernels are not typed Python.
"""Merges the pieces of items that were cut among workers."""

from __future__ import annotations

import triton
import triton.language as tl

from minipic_backend.attention.kernels.work import ITEM_FIELDS, WORKER_FIELDS

__all__ = ["merge_kernel"]


@triton.jit(
    do_not_specialize=["tile_rows"],
    do_not_specialize_on_alignment=["items_ptr", "workers_ptr"],
)
def merge_kernel(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    items_ptr,
    workers_ptr,
    tile_rows,
    stride_token,
    stride_head,
    HEAD_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """One program per cut, KV head and rows; the first cut of an item merges all of it."""
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    worker = tl.program_id(2) + 1
    record = workers_ptr + worker * WORKER_FIELDS
    item = tl.load(record)
    is_used = tl.load(record + 1) >= item
    item_start = tl.load(record + 2)
    item_stop = tl.load(record + 3)
    share = tl.load(record + 4)
    first_worker = worker - 1
    last_worker = (item_stop - 1) // share
    record = items_ptr + item * ITEM_FIELDS
    m = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = m // GROUP < tl.load(record + 2)
    is_cut_here = (item_start < worker * share) & (item_start // share == first_worker)
    if is_used & is_cut_here & (tl.max(is_row.to(tl.int32)) > 0):
        token = tl.load(record + 1) + m // GROUP
        d = tl.arange(0, BLOCK_D)
        acc = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        for part in range(first_worker, last_worker + 1, BLOCK_PARTS):
            w = part + tl.arange(0, BLOCK_PARTS)
            slot = 2 * w + (w == first_worker).to(tl.int32)
            # [BLOCK_PARTS, BLOCK_ROWS (, BLOCK_D)]
            row = ((slot * num_kv_heads + kv_head) * tile_rows)[:, None] + m[None, :]
            mask = (w <= last_worker)[:, None] & is_row[None, :]
            lse = tl.load(part_lse_ptr + row, mask=mask, other=float("-inf"))
            out = tl.load(
                part_ptr + row[:, :, None] * BLOCK_D + d[None, None, :],
                mask=mask[:, :, None] & (d < HEAD_SIZE)[None, None, :],
                other=0.0,
            )
            new_highest = tl.maximum(highest, tl.max(lse, 0))
            origin = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weights = tl.exp2(lse - origin[None, :])
            decay = tl.exp2(highest - origin)
            acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * out, 0)
            total = total * decay + tl.sum(weights, 0)
            highest = new_highest
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        head = kv_head * GROUP + m % GROUP
        tl.store(
            out_ptr
            + (token.to(tl.int64) * stride_token + head * stride_head)[:, None]
            + d[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=is_row[:, None] & (d < HEAD_SIZE)[None, :],
        )
