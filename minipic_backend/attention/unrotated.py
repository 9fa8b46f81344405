"""Attention where keys are cached without rotation (`unrotated`, the paper's mechanism).

Every query is turned once by its position t, every key tile by the positions under which the row
sees it. The keys of a tile stand next to each other, at p0 + n, so that their angles come from one
row of the table and a rotation that is the same for all tiles:

    R_{p0 + n} = R_{p0} R_n

Reading a row of the table per key would double the bytes of a key tile.
"""

from __future__ import annotations

from torch import Tensor

from minipic_backend.attention.geometry import Geometry, next_power_of_2
from minipic_backend.attention.kernels.unrotated import unrotated_kernel
from minipic_backend.attention.launch import check_inputs, merge_parts, new_parts
from minipic_backend.attention.rotary import Rotary
from minipic_backend.attention.rows import QueryRows, RowSegments
from minipic_backend.attention.work import WorkPlan

__all__ = ["unrotated_attention"]


def unrotated_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: QueryRows,
    segments: RowSegments,
    plan: WorkPlan,
    rotary: Rotary,
    out: Tensor,
    *,
    scale: float,
    soft_cap: float = 0.0,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    geometry: Geometry,
) -> Tensor:
    """Writes the attention of the queries of `rows` to `out`; other tokens are left alone.

    Rows of spans work like all others: their segments hold local positions.

    Args:
        query: [num_tokens, num_heads, head_size], not rotated; dtype of `out` or float8_e4m3fn.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size], not rotated, last dim dense;
            fp16, bf16, fp32 or float8_e4m3fn.
        value_cache: same shape and strides.
        rows: of queries, see `QueryRows`.
        segments: that the rows see.
        plan: `plan_work` of this batch, with the block sizes of `geometry`.
        rotary: of this layer; mscale is applied here, to queries and keys.
        out: shape of `query`; its dtype is that of the products: fp16, bf16 or fp32.
        scale: factor on the scores.
        soft_cap: cap * tanh(score / cap) where > 0.
        q_scale: what a query is multiplied by.
        k_scale: what a cached key is multiplied by.
        v_scale: what a cached value is multiplied by.
        geometry: block sizes, see `dispatch`.

    Returns:
        `out`.
    """
    shape = check_inputs(query, key_cache, value_cache, rows, plan, rotary, out, geometry)
    parts, part_lse = new_parts(query, shape, plan, geometry)
    factor = scale * q_scale * k_scale
    half, rest = rotary.rotary_dim // 2, shape.head_size - rotary.rotary_dim
    unrotated_kernel[(shape.num_kv_heads, plan.num_workers)](
        query,
        key_cache,
        value_cache,
        out,
        parts,
        part_lse,
        rotary.cos_sin,
        rows.block_table,
        segments.start,
        segments.end,
        segments.base,
        plan.items,
        plan.pieces,
        plan.workers,
        factor / soft_cap if soft_cap > 0 else factor * 1.4426950408889634,
        rotary.mscale**2,
        soft_cap,
        v_scale,
        plan.window,
        segments.start.shape[0],
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        rows.block_table.stride(0),
        HEAD_SIZE=shape.head_size,
        ROTARY_DIM=rotary.rotary_dim,
        IS_NEOX=rotary.is_neox,
        BLOCK_SIZE=shape.block_size,
        GROUP=shape.group,
        BLOCK_M=geometry.block_m,
        BLOCK_N=geometry.block_n,
        BLOCK_D=shape.block_d,
        BLOCK_HALF=max(16, next_power_of_2(half)),
        BLOCK_REST=max(16, next_power_of_2(rest)),
        CAPPED=soft_cap > 0,
        WINDOWED=plan.window > 0,
        PRECISION="ieee" if out.itemsize == 4 else "tf32",
        num_warps=geometry.num_warps,
        num_stages=geometry.num_stages,
    )
    return merge_parts(parts, part_lse, out, rows, plan, shape, geometry)
