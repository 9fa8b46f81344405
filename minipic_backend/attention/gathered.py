"""Attention over keys gathered from a paged cache, in plain PyTorch (the CPU's path).

The keys of a run are gathered block by block, moved to the positions at which its queries see them,
and met with all queries at once:

    scores = scale · (R_q q) · (R_shift k) + mask,   out = softmax(scores) v

`shift` is 0 but for spans under `span_local`; it is the whole position under `unrotated`.

Products are in fp32; for a bf16 cache on a machine that multiplies bf16, under `span_local`, in
bf16 with sums in fp32 (two to three times faster). Scores are then rounded to bf16 after a number
near the largest of their row is taken off, which changes no softmax, so that those that count are
rounded least:

    scores = round(scale · q·k + mask - m),   m = the largest score of every 16th key

A score that is x above m is off by x / 256 at most: by 2 % of its weight at 5 above.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from minipic_backend.attention.kv_layout import BlockLayout
from minipic_backend.attention.rotary import Rotary, rotate
from minipic_backend.attention.rows import PlacedRun

__all__ = ["GatheredRun", "Scratch", "gather_run", "gathered_attention", "multiplies_bf16"]

_MAX_SCORES = 2**22
"""Scores that are held at once; more queries than that allows are served in turns."""

_SAMPLE_STEP = 16
"""One key of so many is looked at for the number that is taken off a row of scores."""


def multiplies_bf16() -> bool:
    """Whether this machine has instructions for products of bf16."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


class Scratch:
    """Memory that one layer after another computes in, uninitialized; not for two threads.

    Megabytes that are given back and taken anew by each layer come from the system, page by page:
    that costs as much as the products.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What was taken before under this name may be overwritten."""
        count = math.prod(shape)
        held = self._held.get((name, dtype))
        if held is None or held.numel() < count:
            held = self._held[name, dtype] = torch.empty(count, dtype=dtype)
        return held[:count].view(shape)


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
        scratch: memory to compute in; runs that are served one after another share it.
    """

    query: int
    num_queries: int
    block_ids: Tensor
    shifts: Tensor | None
    query_shifts: Tensor | None
    mask: Tensor
    scratch: Scratch = field(default_factory=lambda: Scratch())
    _angles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _masks: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def mask_as(self, dtype: torch.dtype) -> Tensor:
        """`mask` in another dtype; kept."""
        if dtype not in self._masks:
            self._masks[dtype] = self.mask.to(dtype)
        return self._masks[dtype]

    def key_angles(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """cos and sin of `shifts`: [rotary_dim / 2, num_blocks · block_size]. Kept, since all
        layers of a model ask for the same few tables."""
        assert self.shifts is not None
        if id(rotary) not in self._angles:
            cos, sin = rotary.cos_sin[self.shifts].t().contiguous().chunk(2, dim=0)
            self._angles[id(rotary)] = cos, sin
        return self._angles[id(rotary)]


def gather_run(
    placed: PlacedRun,
    block_table: Tensor,
    block_size: int,
    *,
    unrotated: bool,
    scratch: Scratch | None = None,
) -> GatheredRun:
    """What a run sees, as blocks, shifts and a mask.

    Args:
        placed: the run in its batch.
        block_table: [num_requests, max_blocks].
        block_size: tokens of a block.
        unrotated: keys are cached without rotation, and the queries come without.
        scratch: shared with other runs; None for its own.
    """
    run = placed.run
    blocks, tokens, shifts = ([np.empty(0, dtype=np.int64)] for _ in range(3))
    visible = [np.empty(0, dtype=np.bool_)]
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
        scratch=scratch or Scratch(),
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
        [num_queries, num_heads, head_size], bfloat16 where products are, else float32; 0 where
        nothing is seen.
    """
    num_queries, num_heads, head_size = query.shape
    num_kv_heads = key_cache.shape[1]
    group = num_heads // num_kv_heads
    in_bf16 = (
        query.dtype == key_cache.dtype == torch.bfloat16
        and not soft_cap
        and run.query_shifts is None
        and multiplies_bf16()
    )
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    if not run.mask.shape[1]:
        return query.new_zeros(query.shape, dtype=dtype)
    # k: [num_kv_heads, head_size, num_keys]; v: [num_kv_heads, num_keys, head_size]
    k = layout.gather_keys(key_cache, run.block_ids)
    v = layout.gather_values(value_cache, run.block_ids).to(dtype)
    if run.shifts is not None:
        k = _turned(k, *run.key_angles(rotary), dtype, is_neox=rotary.is_neox)
    k = k.to(dtype)
    q = query.to(dtype)
    if run.query_shifts is not None:
        # The model puts mscale on what it rotates of q and of k: here q carries both.
        rows = rotary.cos_sin[run.query_shifts] * rotary.mscale**2
        cos, sin = rows[:, None].chunk(2, dim=-1)
        q = rotate(q, cos, sin, is_neox=rotary.is_neox)
    # [num_kv_heads, num_queries · group, head_size]
    q = q.view(num_queries, num_kv_heads, group, head_size).transpose(0, 1)
    q = q.reshape(num_kv_heads, num_queries * group, head_size)
    mask = run.mask_as(dtype)
    turn = max(1, _MAX_SCORES // (num_heads * mask.shape[1]))
    outs = []
    for first in range(0, num_queries, turn):
        some_q = q[:, first * group : (first + turn) * group]
        some_mask = mask[first : first + turn, None]
        if in_bf16:
            scores = _scores_bf16(run, some_q, k, some_mask, scale)
        else:
            scores = _scores(run, some_q, k, some_mask, scale, soft_cap)
        weights = run.scratch.take("weights", tuple(scores.shape), dtype)
        torch.softmax(scores, dim=-1, out=weights)
        outs.append(torch.bmm(weights, v))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
    out = out.view(num_kv_heads, num_queries, group, head_size).transpose(0, 1)
    return out.reshape(num_queries, num_heads, head_size)


def _scores(
    run: GatheredRun, q: Tensor, k: Tensor, mask: Tensor, scale: float, soft_cap: float
) -> Tensor:
    """float32 [num_kv_heads, queries · group, num_keys]; `mask` is [queries, 1, num_keys].

    Whole products: the same bits however a prompt is cut into chunks, which matters where every
    token of every prompt goes this way (`unrotated`).
    """
    scores = run.scratch.take("scores", (*q.shape[:2], k.shape[2]), q.dtype)
    torch.bmm(q * scale, k, out=scores)
    if soft_cap:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    _by_query(scores, mask).add_(mask)
    return scores


def _scores_bf16(run: GatheredRun, q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The same in bfloat16, each row less a number near its maximum."""
    some = slice(None, None, _SAMPLE_STEP)
    sample = torch.bmm(q, k[..., some].contiguous())
    _by_query(sample, mask).add_(mask[..., some])
    highest = sample.amax(dim=-1, keepdim=True).mul_(scale)
    highest.masked_fill_(highest == -torch.inf, 0.0)  # none of the sample is seen
    scores = run.scratch.take("scores", (*q.shape[:2], k.shape[2]), q.dtype)
    torch.sub(mask, _by_query(highest, mask), out=_by_query(scores, mask))
    return scores.baddbmm_(q, k, alpha=scale)


def _by_query(rows: Tensor, mask: Tensor) -> Tensor:
    """[num_kv_heads, queries · group, n] → [num_kv_heads, queries, group, n], as a view."""
    return rows.view(rows.shape[0], mask.shape[0], -1, rows.shape[2])


def _turned(k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, *, is_neox: bool) -> Tensor:
    """`rotate` along dim 1 of [num_kv_heads, head_size, num_keys], in float32, rounded once to
    `dtype`; without its copies."""
    half = cos.shape[0]
    if not is_neox or 2 * half != k.shape[1]:
        return rotate(k.float(), cos[None], sin[None], is_neox=is_neox, dim=1)
    # (a', b') = (a cos - b sin, b cos + a sin)
    a, b = k[:, :half], k[:, half:]
    out = torch.empty(k.shape, dtype=dtype)
    torch.addcmul(a * cos, b, sin, value=-1, out=out[:, :half])
    torch.addcmul(b * cos, a, sin, out=out[:, half:])
    return out
