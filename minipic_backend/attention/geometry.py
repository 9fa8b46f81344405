"""Sizes of attention layers, and block sizes of the paged kernels for them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "AttentionShape",
    "Geometry",
    "choose_geometry",
    "choose_num_workers",
    "next_power_of_2",
]

# By rows of a tile, heads of up to 128 dims: keys of a tile, and stages. The best of those that
# `benchmarks/kernels.py --tune` tries on an H200. Turned keys pass through shared memory, too, so
# that `unrotated` has room for fewer.
_SPAN_LOCAL = {16: (128, 2), 32: (64, 3), 64: (64, 2), 128: (64, 3)}
_UNROTATED = {16: (64, 3), 32: (64, 3), 64: (64, 2), 128: (64, 2)}
_BLOCKS_PER_SM = {16: 2, 32: 2, 64: 2, 128: 1}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of an attention layer on this device.

    Args:
        num_heads: query heads (of this rank).
        num_kv_heads: KV heads (of this rank).
        head_size: dims of a head.
        block_size: tokens of a KV cache block.
        itemsize: bytes of a query's element.
        unrotated: keys are cached without rotation.
        window: keys further back are not seen; 0 is none.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    itemsize: int = 2
    unrotated: bool = False
    window: int = 0

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Geometry:
    """Block sizes of a paged kernel.

    Args:
        block_m: rows of a tile, queries times heads of a group; a power of two from 16.
        block_n: keys of a tile; a power of two from 16.
        num_warps: warps of a program.
        num_stages: key tiles in flight, plus one.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n; 1 for n <= 1."""
    return 1 << max(n - 1, 0).bit_length()


def choose_geometry(shape: AttentionShape, max_query_len: int) -> Geometry:
    """Block sizes for rows of at most `max_query_len` queries."""
    num_rows = max_query_len * shape.group
    smallest = max(16, next_power_of_2(shape.group))
    if shape.itemsize > 2:  # float32 is for tests: products without matrix units
        return Geometry(smallest, 32, num_warps=4, num_stages=2)
    largest = 64 if shape.head_size > 128 else 128
    block_m = max(smallest, min(next_power_of_2(num_rows), largest))
    if shape.head_size > 128:
        if block_m >= 64:
            return Geometry(block_m, 64, num_warps=8, num_stages=2)
        return Geometry(block_m, 32, num_warps=4, num_stages=3 if block_m == 16 else 2)
    num_warps = 4 if block_m < 128 else 8
    sizes = _UNROTATED if shape.unrotated else _SPAN_LOCAL
    block_n, num_stages = sizes.get(block_m, (64, 2))
    return Geometry(block_m, block_n, num_warps, num_stages)


def choose_num_workers(shape: AttentionShape, geometry: Geometry, num_sms: int) -> int:
    """One wave of thread blocks."""
    per_sm = 1 if shape.head_size > 128 else _BLOCKS_PER_SM.get(geometry.block_m, 1)
    return max(1, num_sms * per_sm // shape.num_kv_heads)
