"""Dependent queries through a stock varlen attention, over copies of the keys they see.

The keys that a run sees lie in blocks all over the cache, under positions of their own, with pads
between them. Copied one behind the other, each turned by R_{shift}, they are an ordinary causal
sequence whose last tokens are the run's queries (`span_local` only):

    (R_{-shift} q) . k = q . (R_{shift} k)

One launch copies the keys and values of all runs, one call serves them; per layer, since a layer's
keys are its own. The attention function is handed in: FlashAttention, or a naive one in tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from minipic_backend.attention.geometry import next_power_of_2
from minipic_backend.attention.kernels.compact import TILE_FIELDS, compact_kernel
from minipic_backend.attention.rotary import Rotary
from minipic_backend.attention.rows import PlacedRun, Run, SeenSegment, upload
from minipic_backend.attention.sequences import joined

__all__ = ["Attend", "CompactPass", "compact_attention", "num_seen", "plan_compact"]

TILE = 64
"""Tokens that a program copies."""


class Attend(Protocol):
    """A causal varlen attention, with FlashAttention's argument names.

    q is [num_queries, num_heads, head_size], k and v are [num_keys, num_kv_heads, head_size];
    masks are aligned to the last key of a sequence. Writes to `out`.
    """

    def __call__(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        cu_seqlens_k: Tensor,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        softcap: float,
        out: Tensor,
    ) -> object: ...


@dataclass(frozen=True, slots=True)
class CompactPass:
    """Runs whose keys are copied and met together; tensors int32, on the device.

    Args:
        tiles: [num_tiles, TILE_FIELDS], what each program copies.
        block_table: [num_requests, max_blocks], of the batch.
        cu_seqlens_q: [num_runs + 1], where the queries of each run start.
        cu_seqlens_k: [num_runs + 1], where its keys start.
        max_seqlen_q: queries of the longest run.
        max_seqlen_k: keys of the longest.
        queries: indices in the batch, int64; a slice where they lie one behind the other.
        num_keys: of all runs.
    """

    tiles: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    queries: Tensor | slice
    num_keys: int


def num_seen(run: Run) -> int:
    """Keys that a run's last query sees; its own pads count."""
    *earlier, own = run.seen
    num_keys = sum([s.end - s.start for s in earlier if s.start < s.end])
    return num_keys + max(run.end - own.start, 0)


def plan_compact(
    runs: Sequence[PlacedRun], block_table: Tensor, max_keys: int
) -> tuple[CompactPass, ...]:
    """Plans dependent runs, on the host, with one upload per pass.

    Args:
        runs: each sees at most `max_keys` keys (`num_seen`).
        block_table: [num_requests, max_blocks], int32.
        max_keys: that the buffer has room for; more take several passes.

    Raises:
        ValueError: a run sees more keys than that.
    """
    passes: list[CompactPass] = []
    pending: list[PlacedRun] = []
    room = max_keys
    for placed in runs:
        need = num_seen(placed.run)
        if need > max_keys:
            raise ValueError(f"A run sees {need} keys; the buffer has room for {max_keys}")
        if need > room:
            passes.append(_pass(pending, block_table))
            pending, room = [], max_keys
        pending.append(placed)
        room -= need
    if pending:
        passes.append(_pass(pending, block_table))
    return tuple(passes)


def compact_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    passes: Sequence[CompactPass],
    rotary: Rotary,
    out: Tensor,
    attend: Attend,
    *,
    scale: float,
    soft_cap: float = 0.0,
) -> Tensor:
    """Writes the attention of the planned queries to `out`; other tokens are left alone.

    Output of pads in the queries' own segments is finite and means nothing.

    Args:
        query: [num_tokens, num_heads, head_size], rotated by its positions.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size], of `query`'s dtype.
        value_cache: like key_cache.
        passes: of this batch.
        rotary: of this layer. mscale is in the keys already and not used.
        out: like `query`.
        attend: the varlen attention.
        scale: factor on the scores.
        soft_cap: cap * tanh(score / cap) where > 0.

    Returns:
        `out`.
    """
    if not query.dtype == key_cache.dtype == out.dtype:
        raise ValueError(
            f"Cache of {key_cache.dtype}, queries of {query.dtype}, output {out.dtype}"
        )
    for part in passes:
        keys, values = _copied(key_cache, value_cache, part, rotary)
        is_slice = isinstance(part.queries, slice)
        own = query[part.queries]
        target = out[part.queries] if is_slice else torch.empty_like(own)
        attend(
            q=own,
            k=keys,
            v=values,
            cu_seqlens_q=part.cu_seqlens_q,
            max_seqlen_q=part.max_seqlen_q,
            cu_seqlens_k=part.cu_seqlens_k,
            max_seqlen_k=part.max_seqlen_k,
            softmax_scale=scale,
            causal=True,
            softcap=soft_cap,
            out=target,
        )
        if not is_slice:
            out[part.queries] = target
    return out


def _copied(
    key_cache: Tensor, value_cache: Tensor, part: CompactPass, rotary: Rotary
) -> tuple[Tensor, Tensor]:
    """[num_keys, num_kv_heads, head_size] each."""
    _, block_size, num_kv_heads, head_size = key_cache.shape
    keys, values = key_cache.new_empty((2, part.num_keys, num_kv_heads, head_size)).unbind(0)
    compact_kernel[(part.tiles.shape[0], num_kv_heads)](
        key_cache,
        value_cache,
        keys,
        values,
        part.tiles,
        part.block_table,
        rotary.cos_sin,
        part.block_table.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        keys.stride(0),
        keys.stride(1),
        BLOCK_SIZE=block_size,
        HEAD_SIZE=head_size,
        ROTARY_DIM=rotary.rotary_dim,
        IS_NEOX=rotary.is_neox,
        BLOCK_T=TILE,
        BLOCK_D=next_power_of_2(head_size),
        num_warps=4,
    )
    return keys, values


def _seen(run: Run) -> list[SeenSegment]:
    """What a run sees, its own segment up to its last query."""
    *earlier, own = run.seen
    return joined([*earlier, SeenSegment(own.start, run.end, own.shift, own.base)])


def _pass(runs: Sequence[PlacedRun], block_table: Tensor) -> CompactPass:
    # Of each segment: request, first token, tokens, shift.
    seen = [_seen(placed.run) for placed in runs]
    segments = np.array(
        [
            (placed.request, s.start, s.end - s.start, s.shift)
            for placed, own in zip(runs, seen, strict=True)
            for s in own
        ],
        dtype=np.int32,
    )
    num_tiles = -(-segments[:, 2] // TILE)
    first_key = np.cumsum(segments[:, 2]) - segments[:, 2]
    tiles = np.repeat(np.column_stack((segments, first_key)), num_tiles, axis=0)
    # How far into its segment each tile starts.
    first_tile = np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    skipped = TILE * (np.arange(len(tiles)) - first_tile)
    tiles[:, 1] += skipped
    tiles[:, 2] = np.minimum(tiles[:, 2] - skipped, TILE)
    tiles[:, 4] += skipped
    num_queries = np.array([placed.run.num_tokens for placed in runs], dtype=np.int32)
    num_keys = np.add.reduceat(segments[:, 2], np.cumsum([0, *map(len, seen[:-1])]))
    starts = np.array([placed.query for placed in runs])
    ends = starts + num_queries
    is_slice = bool((starts[1:] == ends[:-1]).all())
    queries = (
        np.empty(0, dtype=np.int32)
        if is_slice
        else np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])
    )
    parts = (
        tiles.ravel(),
        np.concatenate(([0], np.cumsum(num_queries))),
        np.concatenate(([0], np.cumsum(num_keys))),
        queries,
    )
    packed = upload(np.concatenate(parts), block_table.device)
    tile_part, cu_q, cu_k, indices = torch.split(packed, [len(part) for part in parts])
    return CompactPass(
        tile_part.view(-1, TILE_FIELDS.value),
        block_table,
        cu_q,
        cu_k,
        int(num_queries.max()),
        int(num_keys.max()),
        slice(int(starts[0]), int(ends[-1])) if is_slice else indices.long(),
        int(num_keys.sum()),
    )
