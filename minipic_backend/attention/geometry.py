"""Block sizes of the paged kernels."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Geometry", "next_power_of_2"]


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
