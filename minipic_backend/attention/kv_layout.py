"""How a CPU kernel packs a block of keys and values: found out by writing numbers and looking.

vLLM picks a packing by instruction set (rows, transposed keys, AMX tiles), in C++ and without a
name for it. It is a permutation of a block's numbers, so that one probe tells all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch

__all__ = ["BlockLayout", "Selection", "probe_layout"]

_DIGIT = 128  # exact in bf16 and fp16

Digits: TypeAlias = tuple[tuple[int, int], ...]
"""(size, stride) of an index's digits, the most significant first."""


@dataclass(frozen=True)
class Selection:
    """Tokens of a paged cache.

    Args:
        block_ids: int64 [n], physical blocks.
        block_size: tokens in a block.
        pieces: (start, end) of the tokens that are meant, counted through these blocks.
    """

    block_ids: torch.Tensor
    block_size: int
    pieces: tuple[tuple[int, int], ...]
    _lines: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(end - start for start, end in self.pieces)

    def lines(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cache as lines of one head and one place each, and the numbers of those that hold
        the tokens: head by head, int64 [num_kv_heads · number of tokens].

        Args:
            cache: [num_blocks, num_kv_heads, block_size, head_size], with lines of head_size
                numbers in a row; may be a part of a larger tensor.

        Raises:
            ValueError: the cache is not made of such lines.
        """
        *strides, one = cache.stride()
        width = cache.shape[3]
        if one != 1 or any(stride % width for stride in strides):
            raise ValueError(f"a cache with strides {cache.stride()} is not made of lines")
        per_block, per_head, per_token = steps = [stride // width for stride in strides]
        last = sum((n - 1) * step for n, step in zip(cache.shape[:3], steps, strict=True))
        lines = cache.as_strided((last + 1, width), (width, 1))
        # Most models' layers have all the same.
        key = (cache.shape[1], *cache.stride())
        if key not in self._lines:
            slots = torch.cat([torch.arange(start, end) for start, end in self.pieces])
            block, place = self.block_ids[slots // self.block_size], slots % self.block_size
            heads = torch.arange(cache.shape[1])[:, None] * per_head
            self._lines[key] = (heads + block * per_block + place * per_token).flatten()
        return lines, self._lines[key]


@dataclass(frozen=True)
class BlockLayout:
    """Permutations of one block's numbers; None where a plain view does.

    Args:
        block_size: tokens in a block.
        head_size: numbers of one head.
        key_order: int64 [head_size · block_size]: where number (d, token) of the transposed block
            lies in memory.
        value_order: int64 [block_size · head_size]: where number (token, d) lies.
        keys_are_rows: keys lie as values do, untransposed; `key_order` is None then.
    """

    block_size: int
    head_size: int
    key_order: torch.Tensor | None
    value_order: torch.Tensor | None
    keys_are_rows: bool = False

    @cached_property
    def _key_digits(self) -> tuple[Digits, Digits] | None:
        return _digits(self.key_order, self.head_size)

    @cached_property
    def _value_digits(self) -> tuple[Digits, Digits] | None:
        return _digits(self.value_order, self.block_size)

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

    def gather_keys(
        self, cache: torch.Tensor, chosen: Selection, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Keys of these tokens, as columns.

        Args:
            cache: packed [num_blocks, num_kv_heads, block_size, head_size].
            chosen: n tokens.
            out: where to write them, of any dtype that holds the cache's.

        Returns:
            [num_kv_heads, head_size, n]: `out`, else of the cache's dtype.
        """
        # Along dim 0: along any other, PyTorch may copy the whole cache first.
        blocks = cache.index_select(0, chosen.block_ids)
        if self._key_digits is not None:
            dims, tokens = self._key_digits
            keys = _unfold(blocks, dims, tokens)
            last = 2 + len(dims)
            keys = keys.permute(1, *range(2, last), 0, *range(last, keys.dim()))
        else:
            keys = self.keys(blocks).permute(1, 2, 0, 3)
        columns = keys.reshape(cache.shape[1], self.head_size, -1)
        return torch.cat([columns[..., start:end] for start, end in chosen.pieces], dim=2, out=out)

    def gather_values(self, cache: torch.Tensor, chosen: Selection) -> torch.Tensor:
        """The same for values, as rows: [num_kv_heads, n, head_size]."""
        if self.value_order is None:
            lines, numbers = chosen.lines(cache)
            return lines.index_select(0, numbers).view(cache.shape[1], -1, self.head_size)
        blocks = cache.index_select(0, chosen.block_ids)
        if self._value_digits is not None:
            values = _unfold(blocks, *self._value_digits).transpose(0, 1)
        else:
            values = self.values(blocks).transpose(0, 1)
        rows = values.reshape(cache.shape[1], -1, self.head_size)
        return torch.cat([rows[:, start:end] for start, end in chosen.pieces], dim=1)


def _digits(order: torch.Tensor | None, num_rows: int) -> tuple[Digits, Digits] | None:
    """Digits of a matrix's row and of its column, of whose strides the places in `order` are the
    sums; None where they are not."""
    if order is None:
        return None
    places = order.view(num_rows, -1)
    rows, columns = _split(places[:, 0].tolist()), _split(places[0].tolist())
    if rows is None or columns is None:
        return None
    if not torch.equal(places, places[:, :1] + places[:1]):
        return None
    return rows, columns


def _split(places: list[int]) -> Digits | None:
    """Digits of an index, of whose strides `places`, which begin with 0, are the sums."""
    if places[0]:
        return None
    digits: list[tuple[int, int]] = []
    while len(places) > 1:
        stride = places[1]
        size = next((i for i, place in enumerate(places) if place != i * stride), len(places))
        if len(places) % size:
            return None
        if any(p != places[i % size] + places[i - i % size] for i, p in enumerate(places)):
            return None
        digits.append((size, stride))
        places = places[::size]
    return tuple(reversed(digits))


def _unfold(blocks: torch.Tensor, rows: Digits, columns: Digits) -> torch.Tensor:
    """A view of packed blocks, [n, num_kv_heads, *digits of the row, *digits of the column]: to
    copy it costs a fifth of looking up each number's place."""
    n, num_heads, *block = blocks.shape
    width = math.prod(block)
    sizes, strides = zip(*rows, *columns, strict=True)
    return blocks.contiguous().as_strided(
        (n, num_heads, *sizes), (num_heads * width, width, *strides)
    )


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
