"""What the launchers of the paged kernels share: checks, room for cut items, and their merging."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minipic_backend.attention.geometry import Geometry, next_power_of_2
from minipic_backend.attention.kernels.merge import merge_kernel
from minipic_backend.attention.rotary import Rotary
from minipic_backend.attention.rows import QueryRows
from minipic_backend.attention.work import WorkPlan

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_CACHE_DTYPES = (*_DTYPES, torch.float8_e4m3fn)

__all__ = ["Shape", "check_inputs", "merge_parts", "new_parts"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes read off the inputs; `group` is query heads per KV head, `block_d` the padded head."""

    num_kv_heads: int
    group: int
    head_size: int
    block_d: int
    block_size: int


def check_inputs(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: QueryRows,
    plan: WorkPlan,
    rotary: Rotary,
    out: Tensor,
    geometry: Geometry,
) -> Shape:
    """Sizes of the inputs; ValueError where they do not fit each other."""
    _, num_heads, head_size = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    if num_heads % num_kv_heads or key_cache.shape[3] != head_size:
        raise ValueError(f"query {tuple(query.shape)} and cache {tuple(key_cache.shape)}")
    if key_cache.shape != value_cache.shape or key_cache.stride() != value_cache.stride():
        raise ValueError("Keys and values must have the same shape and strides")
    if key_cache.stride(3) != 1 or query.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("The last dim of query, caches and output must be dense")
    if out.dtype not in _DTYPES or query.dtype not in (out.dtype, torch.float8_e4m3fn):
        raise ValueError(f"query {query.dtype}, output {out.dtype}")
    if key_cache.dtype != value_cache.dtype or key_cache.dtype not in _CACHE_DTYPES:
        raise ValueError(f"cache of {key_cache.dtype} and {value_cache.dtype}")
    if out.shape != query.shape:
        raise ValueError(f"output {tuple(out.shape)}, query {tuple(query.shape)}")
    if rotary.rotary_dim > head_size or rotary.cos_sin.dtype != torch.float32:
        raise ValueError("The rotary table must be float32 and no wider than a head")
    if not rotary.cos_sin.is_contiguous():
        raise ValueError("The rotary table must be contiguous")
    group = num_heads // num_kv_heads
    if plan.block_q * group > geometry.block_m or plan.block_n != geometry.block_n:
        raise ValueError(f"The plan was made for other block sizes than {geometry}")
    if rows.block_table.stride(1) != 1:
        raise ValueError("Rows of the block table must be dense")
    block_d = max(16, next_power_of_2(head_size))
    return Shape(num_kv_heads, group, head_size, block_d, block_size)


def new_parts(
    query: Tensor, shape: Shape, plan: WorkPlan, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """Room for the pieces of cut items: a worker's first item may be one, and its last."""
    size = (2 * plan.num_workers, shape.num_kv_heads, geometry.block_m)
    parts = torch.empty((*size, shape.block_d), dtype=torch.float32, device=query.device)
    return parts, torch.empty(size, dtype=torch.float32, device=query.device)


def merge_parts(
    parts: Tensor,
    part_lse: Tensor,
    out: Tensor,
    rows: QueryRows,
    plan: WorkPlan,
    shape: Shape,
    geometry: Geometry,
) -> Tensor:
    """Writes the cut items to `out`."""
    if plan.num_workers == 1:
        return out
    num_rows = min(plan.block_q, rows.max_query_len) * shape.group
    # Decode cuts a row into many parts, a prefill many rows into few.
    block_rows, block_parts = (1, 64) if geometry.block_m == 16 else (8, 4)
    merge_kernel[(-(-num_rows // block_rows), shape.num_kv_heads, plan.num_workers - 1)](
        parts,
        part_lse,
        out,
        plan.items,
        plan.workers,
        geometry.block_m,
        out.stride(0),
        out.stride(1),
        HEAD_SIZE=shape.head_size,
        GROUP=shape.group,
        BLOCK_D=shape.block_d,
        BLOCK_ROWS=block_rows,
        BLOCK_PARTS=block_parts,
        num_warps=4,
    )
    return out
