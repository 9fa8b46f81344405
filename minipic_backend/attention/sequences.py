"""Virtual sequences: slices of the block table that a stock varlen attention takes as prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minipic_backend.attention.rows import PlacedRun, SeenSegment, upload

__all__ = ["Sequences", "context_sequences", "joined"]


@dataclass(frozen=True, slots=True)
class Sequences:
    """Virtual sequences of one call; tensors int32, on the device.

    Args:
        cu_seqlens_q: [num_sequences + 1], where the queries of each start.
        seqused_k: [num_sequences], keys of each.
        block_table: [num_sequences, max_blocks].
        max_seqlen_q: queries of the longest.
        max_seqlen_k: keys of the longest.
    """

    cu_seqlens_q: Tensor
    seqused_k: Tensor
    block_table: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True, slots=True)
class _KeyRange:
    """Keys [start, start + num_keys) of a request; in front of them its first num_frame_tokens."""

    request: int
    num_queries: int
    start: int
    num_keys: int
    num_frame_tokens: int = 0


def context_sequences(runs: Sequence[PlacedRun], block_table: Tensor, block_size: int) -> Sequences:
    """Spans behind their frames, prefixes and ordinary prompts as causal sequences, in order.

    Args:
        runs: none of them dependent.
        block_table: [num_requests, max_blocks].
        block_size: tokens of a block.
    """
    return _make_sequences(
        [
            _KeyRange(
                placed.request,
                placed.run.num_tokens,
                placed.run.segment_start,
                placed.run.end - placed.run.segment_start,
                placed.run.num_frame_tokens,
            )
            for placed in runs
        ],
        block_table,
        block_size,
    )


def joined(seen: Sequence[SeenSegment]) -> list[SeenSegment]:
    """`seen` without empty segments; neighbours that one query serves are one segment."""
    result: list[SeenSegment] = []
    for segment in seen:
        if segment.start >= segment.end:
            continue
        last = result[-1] if result else None
        if last is not None and (last.end, last.shift) == (segment.start, segment.shift):
            result[-1] = SeenSegment(last.start, segment.end, last.shift, last.base)
        else:
            result.append(segment)
    return result


def _make_sequences(
    sequences: Sequence[_KeyRange], block_table: Tensor, block_size: int
) -> Sequences:
    """The tensors of these sequences; the block table is gathered on the device."""
    values = np.array(
        [(s.request, s.num_queries, s.start, s.num_keys, s.num_frame_tokens) for s in sequences],
        dtype=np.int32,
    ).T
    request, num_queries, start, num_keys, num_frame = values
    if (start % block_size).any() or (num_frame % block_size).any():
        raise ValueError(f"A virtual sequence must start at a block of {block_size} tokens")
    cu_seqlens_q = np.concatenate(([0], np.cumsum(num_queries)))
    total_keys = num_keys + num_frame
    frame = num_frame // block_size
    device = block_table.device
    packed = upload(
        np.concatenate((cu_seqlens_q, total_keys, request, frame, start // block_size)), device
    )
    n = len(sequences)
    seqused_k, rows, frame_blocks, first_block = packed[n + 1 :].view(4, n).unbind(0)
    max_blocks = -(-int(total_keys.max()) // block_size)
    column = torch.arange(max_blocks, device=device)[None, :]
    own_column = column + (first_block - frame_blocks)[:, None]
    column = torch.where(column < frame_blocks[:, None], column, own_column)
    column = column.clamp_max(block_table.shape[1] - 1)
    table = block_table[rows.long()[:, None], column]
    return Sequences(
        packed[: n + 1], seqused_k, table, int(num_queries.max()), int(total_keys.max())
    )
