# mypy: ignore-errors
# Reason: Triton kernels are not typed Python.
"""Steps that kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_tile", "cap_scores", "load_pages", "partner_of", "store_piece", "unshift_row"]


@triton.jit
def partner_of(d, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr):
    """The dim that turns together with d; d itself where nothing turns."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    partner = tl.where(d < HALF, d + HALF, d - HALF) if IS_NEOX else d ^ 1
    return tl.where(d < ROTARY_DIM, partner, d)


@triton.jit
def unshift_row(cos_sin_ptr, shift, d, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr):
    """cos and signed sin with R_{-shift} x = x * cos + x[partner_of] * sin: twice [BLOCK_D].

    (a, b) -> (a cos + b sin, b cos - a sin)
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    frequency = d % HALF if IS_NEOX else d // 2
    is_a = d < HALF if IS_NEOX else d % 2 == 0
    row = cos_sin_ptr + tl.abs(shift).to(tl.int64) * ROTARY_DIM
    is_rotary = d < ROTARY_DIM
    cos = tl.load(row + frequency, mask=is_rotary, other=1.0)
    sin = tl.load(row + HALF + frequency, mask=is_rotary, other=0.0)
    return cos, tl.where(is_a == (shift >= 0), sin, -sin)


@triton.jit
def load_pages(table_ptr, n, is_key, BLOCK_SIZE: tl.constexpr):
    """Physical blocks of the tokens n of one request: [BLOCK_N]."""
    return tl.load(table_ptr + n // BLOCK_SIZE, mask=is_key, other=0)


@triton.jit
def cap_scores(scores, soft_cap, CAPPED: tl.constexpr):
    """Scores in units of log 2; scores come in those units, or if CAPPED divided by the cap."""
    if CAPPED:
        # cap * tanh(x) = cap * (1 - 2 / (exp(2x) + 1))
        LOG2E: tl.constexpr = 1.4426950408889634
        scores = soft_cap * LOG2E * (1.0 - 2.0 / (tl.exp2(2.0 * LOG2E * scores) + 1.0))
    return scores


@triton.jit
def add_tile(scores, v, acc, total, highest, PRECISION: tl.constexpr):
    """One step of the online softmax, base 2.

    scores: [BLOCK_M, BLOCK_N], v: [BLOCK_N, BLOCK_D], acc: [BLOCK_M, BLOCK_D].
    """
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # A query that has seen no key yet: exp2(-inf - 0), not exp2(-inf + inf).
    origin = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - origin[:, None])
    decay = tl.exp2(highest - origin)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return acc, total, new_highest


@triton.jit
def store_piece(
    acc, total, highest, v_scale, is_cut, slot, kv_head, m, d, out_ptrs, out_mask,
    part_ptr, part_lse_ptr, num_kv_heads, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Final output of a whole item, or the share of a cut one with its log-sum-exp (base 2)."""
    is_empty = total == 0.0
    out = acc * (v_scale / tl.where(is_empty, 1.0, total))[:, None]
    if is_cut:
        # [2 * num_workers, num_kv_heads, BLOCK_M (, BLOCK_D)]
        row = (slot * num_kv_heads + kv_head) * BLOCK_M + m
        lse = tl.where(is_empty, float("-inf"), highest + tl.log2(tl.where(is_empty, 1.0, total)))
        tl.store(part_lse_ptr + row, lse)
        tl.store(part_ptr + row[:, None] * BLOCK_D + d[None, :], out, mask=out_mask)
    else:
        tl.store(out_ptrs, out.to(out_ptrs.dtype.element_ty), mask=out_mask)
