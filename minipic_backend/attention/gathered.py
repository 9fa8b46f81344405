"""Attention over keys gathered from a paged cache, in plain PyTorch and fp32 (the CPU's path).

Keys are gathered block by block, moved to the positions at which the queries see them, and met
with all queries of a row at once:

    scores = scale · (R_q q) · (R_shift k) + mask,   out = softmax(scores) v

`shift` is 0 but for spans under `span_local`; it is the whole position under `unrotated`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from minipic_backend.attention.kv_layout import BlockLayout
from minipic_backend.attention.rotation import RotaryTable, rotate

__all__ = ["GatheredRow", "gathered_attention"]


@dataclass
class GatheredRow:
    """One run of queries and the keys that they may see.

    Args:
        query_start: index of the first query in the batch.
        num_queries: queries.
        block_ids: physical blocks of the keys, int64 [num_blocks].
        shifts: rotation that each cached key still needs, int64 [num_blocks · block_size]; None
            where no key needs any.
        query_shifts: the same for queries, int64 [num_queries]; None for none.
        mask: added to the scores, float32 [num_queries, num_blocks · block_size]: 0 or -inf.
    """

    query_start: int
    num_queries: int
    block_ids: torch.Tensor
    shifts: torch.Tensor | None
    query_shifts: torch.Tensor | None
    mask: torch.Tensor
    _angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def key_angles(self, table: RotaryTable) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of `shifts`: [num_blocks, 1, rotary_dim / 2, block_size]. Kept, since all
        layers of a model ask for the same few tables."""
        assert self.shifts is not None
        if id(table) not in self._angles:
            num_blocks = self.block_ids.shape[0]
            self._angles[id(table)] = tuple(  # type: ignore[assignment]
                part[self.shifts].view(num_blocks, 1, -1, part.shape[1]).transpose(2, 3).contiguous()
                for part in (table.cos, table.sin)
            )
        return self._angles[id(table)]


def gathered_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    row: GatheredRow,
    layout: BlockLayout,
    table: RotaryTable,
    scale: float,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Attention of one row.

    Args:
        query: [num_queries, num_heads, head_size], any floating dtype.
        key_cache: [num_blocks, num_kv_heads, block_size, head_size] as vLLM's kernel packs it.
        value_cache: the same for values.
        row: see `GatheredRow`.
        layout: how a block's numbers are packed.
        table: rotary table of this layer.
        scale: factor of the scores.
        soft_cap: scores become soft_cap · tanh(score / soft_cap); 0 for none.

    Returns:
        float32 [num_queries, num_heads, head_size].
    """
    num_queries, num_heads, head_size = query.shape
    num_kv_heads = key_cache.shape[1]
    # k: [num_blocks, num_kv_heads, head_size, block_size]; v: [..., block_size, head_size]
    k = layout.keys(key_cache.index_select(0, row.block_ids))
    v = layout.values(value_cache.index_select(0, row.block_ids))
    q = query.float()
    if row.shifts is not None:
        cos, sin = row.key_angles(table)
        k = rotate(k, cos, sin, is_neox=table.is_neox, dim=2)
    if row.query_shifts is not None:
        cos, sin = table.cos[row.query_shifts], table.sin[row.query_shifts]
        q = rotate(q, cos[:, None], sin[:, None], is_neox=table.is_neox)
        # mscale was in both rotated operands: once for q, once for k.
        scale *= table.mscale**2
    num_keys = row.mask.shape[1]
    # [num_kv_heads, head_size, num_keys]
    k = k.permute(1, 2, 0, 3).reshape(num_kv_heads, head_size, num_keys).float()
    v = v.permute(1, 0, 2, 3).reshape(num_kv_heads, num_keys, head_size).float()
    # [num_kv_heads, group · num_queries, head_size]
    group = num_heads // num_kv_heads
    q = q.view(num_queries, num_kv_heads, group, head_size).permute(1, 2, 0, 3)
    q = q.reshape(num_kv_heads, group * num_queries, head_size)
    scores = torch.bmm(q * scale, k).view(num_kv_heads, group, num_queries, num_keys)
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = torch.softmax(scores.add_(row.mask), dim=-1)
    out = torch.bmm(weights.view(num_kv_heads, group * num_queries, num_keys), v)
    out = out.view(num_kv_heads, group, num_queries, head_size).permute(2, 0, 1, 3)
    return out.reshape(num_queries, num_heads, head_size)
