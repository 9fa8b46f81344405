# mypy: ignore-errors
# Reason: Triton kernels are not typed Python.
"""The kernel of `attention.span_local`, which says what it computes."""

from __future__ import annotations

import triton
import triton.language as tl

from minipic_backend.attention.kernels.tiles import (
    add_tile,
    cap_scores,
    load_pages,
    partner_of,
    store_piece,
    unshift_row,
)
from minipic_backend.attention.kernels.work import ITEM_FIELDS, PIECE_FIELDS, WORKER_FIELDS

__all__ = ["span_local_kernel"]


@triton.jit
def _rebased(
    q_ptrs, q_mask, shift, cos_sin_ptr, d, eye,
    ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr, IN_REGISTERS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """R_{-shift} q in float32, rounded once to DTYPE: [BLOCK_M, BLOCK_D]."""
    cos, sin = unshift_row(cos_sin_ptr, shift, d, ROTARY_DIM, IS_NEOX)
    partner = partner_of(d, ROTARY_DIM, IS_NEOX)
    # [BLOCK_M, BLOCK_D], from L1 or L2 but for the first segment
    q = tl.load(q_ptrs + d[None, :], mask=q_mask, other=0.0)
    q_partner = tl.load(q_ptrs + partner[None, :], mask=q_mask, other=0.0)
    turned = q.to(tl.float32) * cos[None, :] + q_partner.to(tl.float32) * sin[None, :]
    turned = turned.to(DTYPE)
    if IN_REGISTERS:
        # Exact, and leaves the tile where the next product wants it: no trip through shared
        # memory for every key tile.
        turned = tl.dot(turned, eye).to(DTYPE)
    return turned


@triton.jit(
    do_not_specialize=["window", "num_segments", "stride_table"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "seg_start_ptr",
        "seg_end_ptr",
        "seg_shift_ptr",
        "seg_base_ptr",
        "items_ptr",
        "pieces_ptr",
        "workers_ptr",
    ],
)
def span_local_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    part_ptr,
    part_lse_ptr,
    cos_sin_ptr,
    block_table_ptr,
    seg_start_ptr,
    seg_end_ptr,
    seg_shift_ptr,
    seg_base_ptr,
    items_ptr,
    pieces_ptr,
    workers_ptr,
    score_factor,
    soft_cap,
    v_scale,
    window,
    num_segments,
    stride_q_token,
    stride_q_head,
    stride_out_token,
    stride_out_head,
    stride_block,
    stride_slot,
    stride_kv_head,
    stride_table,
    HEAD_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per KV head and worker; rows m of a tile are queries times heads of the group."""
    kv_head = tl.program_id(0)
    worker = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty  # of the products; q, k, v may be fp8
    eye = 0
    if IN_REGISTERS:
        eye = tl.where(d[:, None] == d[None, :], 1.0, 0.0).to(DTYPE)
    head = kv_head * GROUP + m % GROUP

    record = workers_ptr + worker * WORKER_FIELDS
    last_item = tl.load(record + 1)
    for item in range(tl.load(record), last_item + 1):
        record = items_ptr + item * ITEM_FIELDS
        row = tl.load(record)
        token = tl.load(record + 1) + m // GROUP
        num_queries = tl.load(record + 2)
        item_index = tl.load(record + 3)
        begin = tl.load(record + 4)
        query_base = tl.load(record + 5)
        record = pieces_ptr + (item + worker) * PIECE_FIELDS
        first = tl.load(record)
        last = tl.load(record + 1)
        seg = tl.load(record + 2)
        num_tiles = tl.load(record + 3)

        is_query = m // GROUP < num_queries
        index = tl.where(is_query, item_index + m // GROUP, -1)
        q_mask = is_query[:, None] & (d < HEAD_SIZE)[None, :]
        q_ptrs = (q_ptr + token.to(tl.int64) * stride_q_token + head * stride_q_head)[:, None]
        t = index + query_base

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)

        # One flat loop over the key tiles of all segments: the copies of the next tiles stay in
        # flight across segment borders. The block numbers of a tile are loaded one tile ahead:
        # a load that waits for a load would halve the depth of the pipeline.
        table_ptr = block_table_ptr + row.to(tl.int64) * stride_table
        key_ptr = k_ptr + kv_head * stride_kv_head
        value_ptr = v_ptr + kv_head * stride_kv_head
        pos = tl.maximum(tl.load(seg_start_ptr + seg), first)
        stop = tl.minimum(tl.load(seg_end_ptr + seg), last)
        shift = tl.load(seg_shift_ptr + seg)
        base = tl.load(seg_base_ptr + seg)
        n = pos + tl.arange(0, BLOCK_N)
        page = load_pages(table_ptr, n, n < stop, BLOCK_SIZE)
        q = _rebased(
            q_ptrs, q_mask, shift, cos_sin_ptr, d, eye, ROTARY_DIM, IS_NEOX, IN_REGISTERS, DTYPE
        )
        is_new = False
        for _ in range(num_tiles):
            is_key = n < stop
            offset = page.to(tl.int64) * stride_block + (n % BLOCK_SIZE) * stride_slot
            kv_mask = is_key[:, None] & (d < HEAD_SIZE)[None, :]
            # [BLOCK_N, BLOCK_D]
            k = tl.load(key_ptr + offset[:, None] + d[None, :], mask=kv_mask, other=0.0)
            if is_new:
                q = _rebased(
                    q_ptrs, q_mask, shift, cos_sin_ptr, d, eye, ROTARY_DIM, IS_NEOX, IN_REGISTERS,
                    DTYPE,
                )  # fmt: skip
            # (R_{-shift} q) . k
            scores = tl.dot(q, k.to(DTYPE).T, input_precision=PRECISION) * score_factor
            scores = cap_scores(scores, soft_cap, CAPPED)
            scores += tl.where(is_key, 0.0, float("-inf"))[None, :]
            if pos + BLOCK_N > item_index:
                scores = tl.where(n[None, :] <= index[:, None], scores, float("-inf"))
            if WINDOWED:
                scores = tl.where(t[:, None] - (n + base)[None, :] < window, scores, float("-inf"))
            # [BLOCK_N, BLOCK_D]
            v = tl.load(value_ptr + offset[:, None] + d[None, :], mask=kv_mask, other=0.0)
            acc, total, highest = add_tile(scores, v.to(DTYPE), acc, total, highest, PRECISION)

            pos += BLOCK_N
            is_new = pos >= stop
            seg = tl.minimum(seg + is_new.to(tl.int32), num_segments - 1)
            pos = tl.where(is_new, tl.maximum(tl.load(seg_start_ptr + seg), first), pos)
            stop = tl.minimum(tl.load(seg_end_ptr + seg), last)
            shift = tl.load(seg_shift_ptr + seg)
            base = tl.load(seg_base_ptr + seg)
            n = pos + tl.arange(0, BLOCK_N)
            page = load_pages(table_ptr, n, n < stop, BLOCK_SIZE)

        out_ptrs = out_ptr + token.to(tl.int64) * stride_out_token + head * stride_out_head
        store_piece(
            acc, total, highest, v_scale, (first > begin) | (last < item_index + num_queries),
            2 * worker + (first == begin).to(tl.int32), kv_head, m, d,
            out_ptrs[:, None] + d[None, :], q_mask, part_ptr, part_lse_ptr,
            tl.num_programs(0), BLOCK_M, BLOCK_D,
        )  # fmt: skip
