"""How a CPU kernel packs a block of keys and values: found out by writing numbers and looking.

vLLM picks a packing by instruction set (rows, transposed keys, AMX tiles), in C++ and without a
name for it. It is a permutation of a block's numbers, so that one probe tells all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["BlockLayout", "probe_layout"]

_DIGIT = 128  # exact in bf16 and fp16


@dataclass(frozen=True)
class BlockLayout:
    """Permutations of one block's numbers; None where a plain view does.

    Args:
        block_size: tokens in a block.
        head_size: numbers of one head.
        key_order: int64 [head_size · block_size]: where number (d, token) of the transposed block
            lies in memory.
        value_order: int64 [block_size · head_size]: where number (token, d) lies.
    """

    block_size: int
    head_size: int
    key_order: torch.Tensor | None
    value_order: torch.Tensor | None
    keys_are_rows: bool = False

    def keys(self, blocks: torch.Tensor) -> torch.Tensor:
        """Packed [n, num_kv_heads, block_size, head_size] → the same, keys as columns:
        [n, num_kv_heads, head_size, block_size]."""
        flat = blocks.flatten(2)
        if self.keys_are_rows:
            return blocks.transpose(2, 3)
        if self.key_order is not None:
            flat = flat.index_select(2, self.key_order)
        return flat.view(*blocks.shape[:2], self.head_size, self.block_size)

    def values(self, blocks: torch.Tensor) -> torch.Tensor:
        """Packed [n, num_kv_heads, block_size, head_size] → the same shape, in order."""
        if self.value_order is None:
            return blocks
        return blocks.flatten(2).index_select(2, self.value_order).view(blocks.shape)

    def gather_keys(self, cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """Keys of these blocks, as columns.

        Args:
            cache: packed [num_blocks, num_kv_heads, block_size, head_size].
            block_ids: int64 [n].

        Returns:
            [num_kv_heads, head_size, n · block_size], of the cache's dtype.
        """
        # Along dim 0: along any other, PyTorch may copy the whole cache first.
        keys = self.keys(cache.index_select(0, block_ids))
        return keys.permute(1, 2, 0, 3).reshape(cache.shape[1], self.head_size, -1)

    def gather_values(self, cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """The same for values, as rows: [num_kv_heads, n · block_size, head_size]."""
        values = self.values(cache.index_select(0, block_ids))
        return values.transpose(0, 1).reshape(cache.shape[1], -1, self.head_size)


def probe_layout(
    write: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    block_size: int,
    head_size: int,
) -> BlockLayout:
    """Finds the packing of a kernel.

    Args:
        write: writes [block_size, head_size] numbers as keys and as values of one block, and
            returns the block's memory as two flat tensors of block_size · head_size numbers.
        block_size: tokens in a block.
        head_size: numbers of one head.

    Raises:
        ValueError: the packing is no permutation.
    """
    count = block_size * head_size
    numbers = torch.arange(count).view(block_size, head_size)
    digits = [numbers % _DIGIT, numbers // _DIGIT % _DIGIT, numbers // _DIGIT**2]
    found = [torch.zeros(count, dtype=torch.int64) for _ in range(2)]
    for power, digit in enumerate(digits):
        for total, packed in zip(found, write(digit.float()), strict=True):
            total += packed.to(torch.int64) * _DIGIT**power
    places = []
    for order in found:
        if not torch.equal(order.sort().values, torch.arange(count)):
            raise ValueError("this kernel's cache blocks are no permutation of what is written")
        places.append(torch.argsort(order).view(block_size, head_size))
    in_order = torch.arange(count)
    key_places = places[0].t().reshape(-1)
    rows = torch.equal(places[0].reshape(-1), in_order)
    return BlockLayout(
        block_size,
        head_size,
        None if rows or torch.equal(key_places, in_order) else key_places,
        None if torch.equal(places[1].reshape(-1), in_order) else places[1].reshape(-1),
        keys_are_rows=rows,
    )
