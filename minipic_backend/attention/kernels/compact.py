# mypy: ignore-errors
# Reason: Triton kernels are not typed Python.
"""Kernel of `attention.compact`: keys and values out of a paged cache, the keys turned."""

from __future__ import annotations

import triton
import triton.language as tl

from minipic_backend.attention.kernels.tiles import load_pages, partner_of, unshift_row

__all__ = ["TILE_FIELDS", "compact_kernel"]

TILE_FIELDS = tl.constexpr(5)
"""int32 of a tile: request, first token, tokens, shift, where its first key goes."""


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["tiles_ptr"])
def compact_kernel(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    tiles_ptr,
    block_table_ptr,
    cos_sin_ptr,
    stride_table,
    stride_k_block,
    stride_k_token,
    stride_k_head,
    stride_v_block,
    stride_v_token,
    stride_v_head,
    stride_key,
    stride_key_head,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """keys[i] = R_{shift} k, in float32, rounded once; values[i] = v.

    One program per tile and KV head.
    """
    tile_ptr = tiles_ptr + tl.program_id(0) * TILE_FIELDS
    head = tl.program_id(1)
    request = tl.load(tile_ptr).to(tl.int64)
    first = tl.load(tile_ptr + 1)
    count = tl.load(tile_ptr + 2)
    shift = tl.load(tile_ptr + 3)
    target = tl.load(tile_ptr + 4).to(tl.int64)
    t = tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    is_key = t < count
    mask = is_key[:, None] & (d < HEAD_SIZE)[None, :]
    token = first + t
    block = load_pages(block_table_ptr + request * stride_table, token, is_key, BLOCK_SIZE)
    block = block.to(tl.int64)
    slot = token % BLOCK_SIZE
    # [BLOCK_T, BLOCK_D]
    k_ptrs = k_ptr + (block * stride_k_block + slot * stride_k_token)[:, None]
    k_ptrs += head * stride_k_head
    v_ptrs = v_ptr + (block * stride_v_block + slot * stride_v_token)[:, None]
    v = tl.load(v_ptrs + head * stride_v_head + d[None, :], mask=mask, other=0.0)
    k = tl.load(k_ptrs + d[None, :], mask=mask, other=0.0)
    if shift != 0:
        partner = partner_of(d, ROTARY_DIM, IS_NEOX)
        k_partner = tl.load(k_ptrs + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        cos, sin = unshift_row(cos_sin_ptr, -shift, d, ROTARY_DIM, IS_NEOX)
        k = (k.to(tl.float32) * cos[None, :] + k_partner * sin[None, :]).to(k.dtype)
    target_rows = ((target + t) * stride_key + head * stride_key_head)[:, None] + d[None, :]
    tl.store(keys_ptr + target_rows, k, mask=mask)
    tl.store(values_ptr + target_rows, v, mask=mask)
