# mypy: ignore-errors
# Reason: Triton kernels are not typed Python.
"""The kernel of `attention.unrotated`, which says what it computes."""

from __future__ import annotations

import triton
import triton.language as tl

from minipic_backend.attention.kernels.tiles import add_tile, cap_scores, load_pages, store_piece
from minipic_backend.attention.kernels.work import ITEM_FIELDS, PIECE_FIELDS, WORKER_FIELDS

__all__ = ["unrotated_kernel"]


@triton.jit
def _key_halves(
    ptrs, is_key, h, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """The dims of a key tile that turn together: twice [BLOCK_N, BLOCK_HALF], in float32."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    if IS_NEOX:
        mask = is_key[:, None] & (h < HALF)[None, :]
        a = tl.load(ptrs + h[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(ptrs + HALF + h[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        # One dense load; dims 2i and 2i + 1 part in registers.
        dims = tl.arange(0, 2 * BLOCK_HALF)
        mask = is_key[:, None] & (dims < ROTARY_DIM)[None, :]
        both = tl.load(ptrs + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (both.shape[0], BLOCK_HALF, 2)))
    return a, b


@triton.jit(
    do_not_specialize=["window", "num_segments", "stride_table"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "seg_start_ptr",
        "seg_end_ptr",
        "seg_base_ptr",
        "items_ptr",
        "pieces_ptr",
        "workers_ptr",
    ],
)
def unrotated_kernel(
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
    seg_base_ptr,
    items_ptr,
    pieces_ptr,
    workers_ptr,
    score_factor,
    q_factor,
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
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per KV head and worker; rows m of a tile are queries times heads of the group."""
    kv_head = tl.program_id(0)
    worker = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    h = tl.arange(0, BLOCK_HALF)
    rest = ROTARY_DIM + tl.arange(0, BLOCK_REST)
    HALF: tl.constexpr = ROTARY_DIM // 2
    HAS_REST: tl.constexpr = ROTARY_DIM < HEAD_SIZE
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty  # of the products; q, k, v may be fp8
    is_half = h < HALF
    # R_n, the same for every tile: [BLOCK_N, BLOCK_HALF]
    n_rows = cos_sin_ptr + tl.arange(0, BLOCK_N)[:, None] * ROTARY_DIM + h[None, :]
    cos_n = tl.load(n_rows, mask=is_half[None, :], other=1.0)
    sin_n = tl.load(n_rows + HALF, mask=is_half[None, :], other=0.0)
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
        t = tl.where(is_query, index + query_base, 0)
        q_ptrs = (q_ptr + token.to(tl.int64) * stride_q_token + head * stride_q_head)[:, None]
        q_mask = is_query[:, None] & is_half[None, :]
        # [BLOCK_M, BLOCK_HALF]
        dim_a = h if IS_NEOX else 2 * h
        dim_b = h + HALF if IS_NEOX else 2 * h + 1
        q_a = tl.load(q_ptrs + dim_a[None, :], mask=q_mask, other=0.0)
        q_b = tl.load(q_ptrs + dim_b[None, :], mask=q_mask, other=0.0)
        t_rows = cos_sin_ptr + t.to(tl.int64)[:, None] * ROTARY_DIM + h[None, :]
        cos_t = tl.load(t_rows, mask=q_mask, other=1.0) * q_factor
        sin_t = tl.load(t_rows + HALF, mask=q_mask, other=0.0) * q_factor
        # R_t (a, b) = (a cos - b sin, b cos + a sin), and mscale of query and key
        turned_a = (q_a.to(tl.float32) * cos_t - q_b.to(tl.float32) * sin_t).to(DTYPE)
        turned_b = (q_b.to(tl.float32) * cos_t + q_a.to(tl.float32) * sin_t).to(DTYPE)
        if HAS_REST:
            rest_mask = is_query[:, None] & (rest < HEAD_SIZE)[None, :]
            q_rest = tl.load(q_ptrs + rest[None, :], mask=rest_mask, other=0.0).to(DTYPE)

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)

        # The loop over key tiles is that of `span_local`, which says why.
        table_ptr = block_table_ptr + row.to(tl.int64) * stride_table
        key_ptr = k_ptr + kv_head * stride_kv_head
        value_ptr = v_ptr + kv_head * stride_kv_head
        pos = tl.maximum(tl.load(seg_start_ptr + seg), first)
        stop = tl.minimum(tl.load(seg_end_ptr + seg), last)
        base = tl.load(seg_base_ptr + seg)
        n = pos + tl.arange(0, BLOCK_N)
        page = load_pages(table_ptr, n, n < stop, BLOCK_SIZE)
        p0_row = cos_sin_ptr + tl.where(pos < stop, pos + base, 0).to(tl.int64) * ROTARY_DIM + h
        # [BLOCK_HALF]
        cos_0 = tl.load(p0_row, mask=is_half, other=1.0)
        sin_0 = tl.load(p0_row + HALF, mask=is_half, other=0.0)
        for _ in range(num_tiles):
            is_key = n < stop
            offset = page.to(tl.int64) * stride_block + (n % BLOCK_SIZE) * stride_slot
            # [BLOCK_N, BLOCK_HALF]
            k_a, k_b = _key_halves(
                key_ptr + offset[:, None], is_key, h, ROTARY_DIM, IS_NEOX, BLOCK_HALF
            )
            # R_{p0} R_n
            cos = cos_0[None, :] * cos_n - sin_0[None, :] * sin_n
            sin = sin_0[None, :] * cos_n + cos_0[None, :] * sin_n
            # R_p (a, b) = (a cos - b sin, b cos + a sin)
            k_turned_a = (k_a * cos - k_b * sin).to(DTYPE)
            k_turned_b = (k_b * cos + k_a * sin).to(DTYPE)
            scores = tl.dot(turned_a, k_turned_a.T, input_precision=PRECISION)
            scores = tl.dot(turned_b, k_turned_b.T, scores, input_precision=PRECISION)
            if HAS_REST:
                k_mask = is_key[:, None] & (rest < HEAD_SIZE)[None, :]
                k_rest = tl.load(
                    key_ptr + offset[:, None] + rest[None, :], mask=k_mask, other=0.0
                ).to(DTYPE)
                scores = tl.dot(q_rest, k_rest.T, scores, input_precision=PRECISION)
            scores = cap_scores(scores * score_factor, soft_cap, CAPPED)
            scores += tl.where(is_key, 0.0, float("-inf"))[None, :]
            if pos + BLOCK_N > item_index:
                scores = tl.where(n[None, :] <= index[:, None], scores, float("-inf"))
            if WINDOWED:
                scores = tl.where(t[:, None] - (n + base)[None, :] < window, scores, float("-inf"))
            v_mask = is_key[:, None] & (d < HEAD_SIZE)[None, :]
            # [BLOCK_N, BLOCK_D]
            v = tl.load(value_ptr + offset[:, None] + d[None, :], mask=v_mask, other=0.0)
            v = v.to(DTYPE)
            acc, total, highest = add_tile(scores, v, acc, total, highest, PRECISION)

            pos += BLOCK_N
            is_new = pos >= stop
            seg = tl.minimum(seg + is_new.to(tl.int32), num_segments - 1)
            pos = tl.where(is_new, tl.maximum(tl.load(seg_start_ptr + seg), first), pos)
            stop = tl.minimum(tl.load(seg_end_ptr + seg), last)
            base = tl.load(seg_base_ptr + seg)
            n = pos + tl.arange(0, BLOCK_N)
            page = load_pages(table_ptr, n, n < stop, BLOCK_SIZE)
            p0_row = cos_sin_ptr + tl.where(pos < stop, pos + base, 0).to(tl.int64) * ROTARY_DIM + h
            cos_0 = tl.load(p0_row, mask=is_half, other=1.0)
            sin_0 = tl.load(p0_row + HALF, mask=is_half, other=0.0)

        out_ptrs = out_ptr + token.to(tl.int64) * stride_out_token + head * stride_out_head
        out_mask = is_query[:, None] & (d < HEAD_SIZE)[None, :]
        store_piece(
            acc, total, highest, v_scale, (first > begin) | (last < item_index + num_queries),
            2 * worker + (first == begin).to(tl.int32), kv_head, m, d,
            out_ptrs[:, None] + d[None, :], out_mask, part_ptr, part_lse_ptr,
            tl.num_programs(0), BLOCK_M, BLOCK_D,
        )  # fmt: skip
