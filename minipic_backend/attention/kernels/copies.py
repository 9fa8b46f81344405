# mypy: ignore-errors
# Reason: Triton kernels are not typed Python.
"""Kernels of `attention.virtual`: turned copies of queries, and the merging of what they saw."""

from __future__ import annotations

import triton
import triton.language as tl

from minipic_backend.attention.kernels.tiles import partner_of, unshift_row

__all__ = ["copy_kernel", "merge_copies_kernel"]


@triton.jit(
    do_not_specialize=[],
    do_not_specialize_on_alignment=["source_ptr", "shift_ptr"],
)
def copy_kernel(
    q_ptr,
    copies_ptr,
    source_ptr,
    shift_ptr,
    cos_sin_ptr,
    num_heads,
    stride_q_token,
    stride_q_head,
    stride_copy,
    stride_copy_head,
    HEAD_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """copies[c] = R_{-shift[c]} q[source[c]], in float32, rounded once; one program per copy."""
    copy = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, BLOCK_D)
    token = tl.load(source_ptr + copy).to(tl.int64)
    shift = tl.load(shift_ptr + copy)
    cos, sin = unshift_row(cos_sin_ptr, shift, d, ROTARY_DIM, IS_NEOX)
    partner = partner_of(d, ROTARY_DIM, IS_NEOX)
    mask = (head < num_heads)[:, None] & (d < HEAD_SIZE)[None, :]
    # [BLOCK_HEADS, BLOCK_D]
    q_ptrs = q_ptr + token * stride_q_token + (head * stride_q_head)[:, None]
    q = tl.load(q_ptrs + d[None, :], mask=mask, other=0.0).to(tl.float32)
    q_partner = tl.load(q_ptrs + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    out = q * cos[None, :] + q_partner * sin[None, :]
    copy_ptrs = copies_ptr + copy.to(tl.int64) * stride_copy + (head * stride_copy_head)[:, None]
    tl.store(copy_ptrs + d[None, :], out.to(copies_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "num_own",
        "stride_own_lse",
        "stride_own_lse_head",
        "stride_lse",
        "stride_lse_head",
    ],
    do_not_specialize_on_alignment=[
        "own_lse_ptr",
        "lse_ptr",
        "source_ptr",
        "first_ptr",
        "step_ptr",
        "count_ptr",
    ],
)
def merge_copies_kernel(
    out_ptr,
    parts_ptr,
    own_lse_ptr,
    lse_ptr,
    source_ptr,
    first_ptr,
    step_ptr,
    count_ptr,
    num_own,
    stride_out_token,
    stride_out_head,
    stride_part,
    stride_part_head,
    stride_own_lse,
    stride_own_lse_head,
    stride_lse,
    stride_lse_head,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """out = sum_i exp(lse_i) part_i / sum_i exp(lse_i); one program per query and head.

    Part 0 is what the query saw of its own segment; the others are its copies.
    """
    query = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    d_mask = d < HEAD_SIZE
    first = tl.load(first_ptr + query)
    step = tl.load(step_ptr + query)
    count = tl.load(count_ptr + query)
    acc = tl.zeros([BLOCK_D], tl.float32)
    total = 0.0
    highest = float("-inf")
    for part in range(0, count + 1, BLOCK_PARTS):
        # [BLOCK_PARTS (, BLOCK_D)]
        i = part + tl.arange(0, BLOCK_PARTS)
        copy = tl.where(i == 0, 0, first + (i - 1) * step)
        row = tl.where(i == 0, query, num_own + copy).to(tl.int64)
        own_lse = tl.load(
            own_lse_ptr + query * stride_own_lse + head * stride_own_lse_head + i,
            mask=i == 0,
            other=float("-inf"),
        )
        lse = tl.load(
            lse_ptr + copy.to(tl.int64) * stride_lse + head * stride_lse_head,
            mask=(i > 0) & (i <= count),
            other=float("-inf"),
        )
        lse = tl.where(i == 0, own_lse, lse)
        # FlashAttention 2 says +inf where there was no key.
        lse = tl.where(lse == float("inf"), float("-inf"), lse)
        is_seen = (i <= count) & (lse > float("-inf"))
        part_ptrs = parts_ptr + (row * stride_part + head * stride_part_head)[:, None] + d[None, :]
        out = tl.load(part_ptrs, mask=is_seen[:, None] & d_mask[None, :], other=0.0)
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        origin = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp(lse - origin)
        decay = tl.exp(highest - origin)
        acc = acc * decay + tl.sum(weights[:, None] * out.to(tl.float32), 0)
        total = total * decay + tl.sum(weights, 0)
        highest = new_highest
    out = acc / tl.where(total == 0.0, 1.0, total)
    token = tl.load(source_ptr + query).to(tl.int64)
    out_ptrs = out_ptr + token * stride_out_token + head * stride_out_head + d
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=d_mask)
