"""Attention over keys gathered from a paged cache, in plain PyTorch and fp32 (the CPU's path).

The keys of a run are gathered block by block, moved to the positions at which its queries see them,
and met with all queries at once:

    scores = scale · (R_q q) · (R_shift k) + mask,   out = softmax(scores) v

`shift` is 0 but for spans under `span_local`; it is the whole position under `unrotated`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minipic_backend.attention.kv_layout import BlockLayout
from minipic_backend.attention.rotary import Rotary, rotate
from minipic_backend.attention.rows import PlacedRun

__all__ = ["GatheredRun", "gather_run", "gathered_attention"]


@dataclass
class GatheredRun:
    """One run of queries and the keys that they may see.

    Args:
        query: index of the first query in the batch.
        num_queries: queries.
        block_ids: physical blocks of the keys, int64 [num_blocks].
        shifts: rotation that each cached key still needs, int64 [num_blocks · block_size]; None
            where no key needs any.
        query_shifts: the same for queries, int64 [num_queries]; None for none.
        mask: added to the scores, float32 [num_queries, num_blocks · block_size]: 0 or -inf.
    """

    query: int
    num_queries: int
    block_ids: Tensor
    shifts: Tensor | None
    query_shifts: Tensor | None
    mask: Tensor
    _angles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _masks: dict[int, Tensor] = field(default_factory=dict)

    def grouped_mask(self, group: int) -> Tensor:
        """`mask` for `group` query heads on end: [group · num_queries, num_blocks · block_size]."""
        if group not in self._masks:
            self._masks[group] = self.mask.repeat(group, 1)
        return self._masks[group]

    def key_angles(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """cos and sin of `shifts`: [num_blocks, 1, rotary_dim / 2, block_size]. Kept, since all
        layers of a model ask for the same few tables."""
        assert self.shifts is not None
        if id(rotary) not in self._angles:
            num_blocks = self.block_ids.shape[0]
            rows = rotary.cos_sin[self.shifts].view(num_blocks, 1, -1, rotary.rotary_dim)
            cos, sin = rows.transpose(2, 3).contiguous().chunk(2, dim=2)
            self._angles[id(rotary)] = cos, sin
        return self._angles[id(rotary)]


def gather_run(
    placed: PlacedRun, block_table: Tensor, block_size: int, *, unrotated: bool
) -> GatheredRun:
    """What a run sees, as blocks, shifts and a mask.

    Args:
        placed: the run in its batch.
        block_table: [num_requests, max_blocks].
        block_size: tokens of a block.
        unrotated: keys are cached without rotation, and the queries come without.
    """
    run = placed.run
    blocks, tokens, visible, shifts = [], [], [], []
    for seen in run.seen:
        end = min(seen.end, run.end)
        if seen.start >= end:
            continue
        lo, hi = seen.start // block_size, -(-end // block_size)
        slots = np.arange(lo * block_size, hi * block_size)
        is_seen = (slots >= seen.start) & (slots < end)
        blocks.append(np.arange(lo, hi))
        tokens.append(slots)
        visible.append(is_seen)
        shifts.append(np.where(is_seen, slots + seen.base if unrotated else seen.shift, 0))
    queries = np.arange(run.start, run.end)
    is_seen = np.concatenate(visible)[None, :] & (
        np.concatenate(tokens)[None, :] <= queries[:, None]
    )
    mask = np.where(is_seen, np.float32(0.0), np.float32(-np.inf))
    shift = torch.from_numpy(np.concatenate(shifts))
    columns = torch.from_numpy(np.concatenate(blocks))
    return GatheredRun(
        query=placed.query,
        num_queries=run.num_tokens,
        block_ids=block_table[placed.request, columns].long(),
        shifts=shift if shift.any() else None,
        query_shifts=torch.from_numpy(queries + run.seen[-1].base) if unrotated else None,
        mask=torch.from_numpy(mask),
    )


def gathered_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    run: GatheredRun,
    layout: BlockLayout,
    rotary: Rotary,
    scale: float,
    soft_cap: float = 0.0,
) -> Tensor:
    """Attention of one run.

    Args:
        query: [num_queries, num_heads, head_size], any floating dtype.
        key_cache: [num_blocks, num_kv_heads, block_size, head_size] as vLLM's kernel packs it.
        value_cache: the same for values.
        run: see `GatheredRun`.
        layout: how a block's numbers are packed.
        rotary: of this layer.
        scale: factor of the scores.
        soft_cap: scores become soft_cap · tanh(score / soft_cap); 0 for none.

    Returns:
        float32 [num_queries, num_heads, head_size].
    """
    num_queries, num_heads, head_size = query.shape
    num_kv_heads = key_cache.shape[1]
    # k: [num_blocks, num_kv_heads, head_size, block_size]; v: [..., block_size, head_size]
    k = layout.keys(key_cache.index_select(0, run.block_ids))
    v = layout.values(value_cache.index_select(0, run.block_ids))
    q = query.float()
    if run.shifts is not None:
        cos, sin = run.key_angles(rotary)
        k = rotate(k, cos, sin, is_neox=rotary.is_neox, dim=2)
    if run.query_shifts is not None:
        # The model puts mscale on what it rotates of q and of k: here q carries both.
        rows = rotary.cos_sin[run.query_shifts] * rotary.mscale**2
        cos, sin = rows[:, None].chunk(2, dim=-1)
        q = rotate(q, cos, sin, is_neox=rotary.is_neox)
    num_keys = run.mask.shape[1]
    # both [num_kv_heads, num_keys, head_size]
    k = k.permute(1, 0, 3, 2).reshape(num_kv_heads, num_keys, head_size).float()
    v = v.permute(1, 0, 2, 3).reshape(num_kv_heads, num_keys, head_size).float()
    # [num_kv_heads, group · num_queries, head_size]
    group = num_heads // num_kv_heads
    q = q.view(num_queries, num_kv_heads, group, head_size).permute(1, 2, 0, 3)
    q = q.reshape(num_kv_heads, group * num_queries, head_size)
    mask = run.grouped_mask(group)
    if soft_cap or run.query_shifts is not None or key_cache.dtype == torch.float32:
        # Whole products: the same bits however a prompt is cut into chunks, which matters where
        # every token of every prompt goes this way (`unrotated`). And exact to float32, where
        # PyTorch's fused attention, twice as fast, has an exponential of 20 bits.
        scores = torch.bmm(q * scale, k.transpose(1, 2))
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        out = torch.bmm(torch.softmax(scores + mask, dim=-1), v)
    else:
        out = scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=scale)[0]
    out = out.view(num_kv_heads, group, num_queries, head_size).permute(2, 0, 1, 3)
    return out.reshape(num_queries, num_heads, head_size)
