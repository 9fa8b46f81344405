"""Attention over keys gathered from a paged cache, in plain PyTorch (the CPU's path).

The keys that a run may see are gathered, pads left out, moved to the positions at which its queries
see them, and met with all queries at once:

    scores = scale · (R_q q) · (R_shift k) + mask,   out = softmax(scores) v

`shift` is 0 but for spans under `span_local`; it is the whole position under `unrotated`. `mask`
is 0 but for the run's own tokens, the last of its keys.

Products are in fp32; for a bf16 cache on a machine that multiplies bf16, under `span_local`, in
bf16 with sums in fp32 (two to three times faster). Scores are then rounded to bf16 after a number
near the largest of their row is taken off, which changes no softmax, so that those that count are
rounded least:

    scores = round(scale · (q·k - m)) + mask,   m = the largest q·k of every 16th key

A score that is x above scale · m is off by x / 256 at most: by 2 % of its weight at 5 above. The
product takes m off by itself where there are many queries: q has one more number, -m, and k one
more, 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from minipic_backend.attention.kv_layout import BlockLayout, Selection
from minipic_backend.attention.rotary import Rotary, rotate
from minipic_backend.attention.rows import PlacedRun

__all__ = ["GatheredRun", "Scratch", "gather_run", "gathered_attention", "multiplies_bf16"]

_MAX_SCORES = 2**22
"""Scores that are held at once; more queries than that allows are served in turns."""

_FEW_QUERIES = 8
"""Up to so many, a number more in each key costs more than it saves."""

_KEY_STEP = 64
"""Keys come in whole steps, the last ones unseen: so that rows of products sum in the same order,
most of them to the same bits, in a chunk of a prompt and in the whole (but for Intel's MKL, in
float32 and above 384 keys). A model in bf16 makes much of other bits: 1e-7 here is 0.1 and more in
its log-probabilities."""

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
        keys: the keys.
        shifts: rotation that cached keys still need, int64 [num_turned]; None where none does.
        first_turned: index of the first of these keys.
        query_shifts: the same for queries, int64 [num_queries]; None for none.
        mask: added to the scores of the last keys, which not all queries see, float32
            [num_queries, num_masked]: 0 or -inf.
        scratch: memory to compute in; runs that are served one after another share it.
    """

    query: int
    num_queries: int
    keys: Selection
    shifts: Tensor | None
    query_shifts: Tensor | None
    mask: Tensor
    first_turned: int = 0
    scratch: Scratch = field(default_factory=lambda: Scratch())
    _angles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _masks: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def mask_as(self, dtype: torch.dtype) -> Tensor:
        """`mask` in another dtype; kept."""
        if dtype not in self._masks:
            self._masks[dtype] = self.mask.to(dtype)
        return self._masks[dtype]

    def key_angles(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """cos [rotary_dim / 2, num_turned] of `shifts`, and (-sin, sin) [2, rotary_dim / 2,
        num_turned]. Kept, since all layers of a model ask for the same few tables."""
        assert self.shifts is not None
        if id(rotary) not in self._angles:
            cos, sin = rotary.cos_sin[self.shifts].t().contiguous().chunk(2, dim=0)
            self._angles[id(rotary)] = cos, torch.stack((-sin, sin))
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
    pieces = []
    blocks, tokens, shifts = ([np.empty(0, dtype=np.int64)] for _ in range(3))
    num_slots = 0
    for seen in run.seen:
        end = min(seen.end, run.end)
        if seen.start >= end:
            continue
        lo, hi = seen.start // block_size, -(-end // block_size)
        first = num_slots + seen.start - lo * block_size
        own = np.arange(seen.start, end)
        blocks.append(np.arange(lo, hi))
        pieces.append((first, first + end - seen.start))
        tokens.append(own)
        shifts.append(own + seen.base if unrotated else np.full_like(own, seen.shift))
        num_slots += (hi - lo) * block_size
    queries = np.arange(run.start, run.end)
    token = np.concatenate(tokens)
    is_hidden = token > run.start  # from the first query
    num_free = int(is_hidden.argmax()) if is_hidden.any() else len(token)
    is_seen = token[None, num_free:] <= queries[:, None]
    mask = np.where(is_seen, np.float32(0.0), np.float32(-np.inf))
    if missing := -len(token) % _KEY_STEP:
        mask = np.pad(mask, ((0, 0), (0, missing)), constant_values=-np.inf)
        pieces += _first(pieces, missing)
    shift = np.concatenate(shifts)
    turned = np.flatnonzero(shift)
    columns = torch.from_numpy(np.concatenate(blocks))
    block_ids = block_table[placed.request, columns].long()
    return GatheredRun(
        query=placed.query,
        num_queries=run.num_tokens,
        keys=Selection(block_ids, block_size, tuple(pieces)),
        shifts=torch.from_numpy(shift[turned[0] : turned[-1] + 1]) if len(turned) else None,
        first_turned=int(turned[0]) if len(turned) else 0,
        query_shifts=torch.from_numpy(queries + run.seen[-1].base) if unrotated else None,
        mask=torch.from_numpy(mask),
        scratch=scratch or Scratch(),
    )


def _first(pieces: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Pieces of `count` tokens, taken from the front, over and over if need be."""
    start, end = pieces[0]
    whole, rest = divmod(count, end - start)
    return [(start, end)] * whole + [(start, start + rest)] * bool(rest)


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
    if not run.keys.pieces:
        return query.new_zeros(query.shape, dtype=dtype)
    # Many queries in bf16: and a row of ones behind each head's keys, see `_scores_bf16`.
    num_ones = int(in_bf16 and num_queries > _FEW_QUERIES)
    shape = num_kv_heads, head_size + num_ones, run.keys.num_tokens
    with_ones = run.scratch.take("keys", shape, dtype)
    with_ones[:, head_size:] = 1
    k = layout.gather_keys(key_cache, run.keys, out=with_ones[:, :head_size])
    # k: [num_kv_heads, head_size, num_keys]; v: [num_kv_heads, num_keys, head_size]
    v = layout.gather_values(value_cache, run.keys).to(dtype)
    if run.shifts is not None:
        cos, sines = run.key_angles(rotary)
        turned = k[..., run.first_turned : run.first_turned + len(run.shifts)]
        _turn(turned, cos, sines, run.scratch, is_neox=rotary.is_neox)
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
    turn = max(1, _MAX_SCORES // (num_heads * k.shape[2]))
    outs = []
    for first in range(0, num_queries, turn):
        some_q = q[:, first * group : (first + turn) * group]
        some_mask = mask[first : first + turn]
        if in_bf16:
            scores = _scores_bf16(run, some_q, with_ones, some_mask, scale)
        else:
            scores = _scores(run, some_q, k, some_mask, scale, soft_cap)
        weights = torch.softmax(scores, dim=-1, out=scores)
        outs.append(torch.bmm(weights, v))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
    out = out.view(num_kv_heads, num_queries, group, head_size).transpose(0, 1)
    return out.reshape(num_queries, num_heads, head_size)


def _scores(
    run: GatheredRun, q: Tensor, k: Tensor, mask: Tensor, scale: float, soft_cap: float
) -> Tensor:
    """float32 [num_kv_heads, queries · group, num_keys]; `mask` is [queries, num_masked]."""
    scores = run.scratch.take("scores", (*q.shape[:2], k.shape[2]), q.dtype)
    torch.bmm(q * scale, k, out=scores)
    if soft_cap:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    return _masked(scores, mask)


def _scores_bf16(run: GatheredRun, q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The same in bfloat16, each row less a number near its maximum. `k` may end with a row of
    ones: [num_kv_heads, head_size + 1, num_keys]."""
    sample = torch.bmm(q, k[:, : q.shape[2], ::_SAMPLE_STEP].contiguous())
    first = -(k.shape[2] - mask.shape[1]) % _SAMPLE_STEP  # of the mask's keys in the sample
    _masked(sample, mask[:, first::_SAMPLE_STEP])
    # The first key is seen by all queries. amax is slow in bf16.
    highest = sample.float().amax(dim=-1, keepdim=True).to(q.dtype)
    scores = run.scratch.take("scores", (*q.shape[:2], k.shape[2]), q.dtype)
    if k.shape[1] == q.shape[2]:
        torch.baddbmm(highest * -scale, q, k, alpha=scale, out=scores)
    else:
        q = torch.cat((q, -highest), dim=2)
        torch.baddbmm(scores, q, k, beta=0, alpha=scale, out=scores)
    return _masked(scores, mask)


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    """`scores` [num_kv_heads, queries · group, num_keys], the last of them plus `mask`."""
    num_masked = mask.shape[1]
    if num_masked:
        by_query = scores.view(scores.shape[0], mask.shape[0], -1, scores.shape[2])
        by_query[..., -num_masked:].add_(mask[:, None])
    return scores


def _turn(k: Tensor, cos: Tensor, sines: Tensor, scratch: Scratch, *, is_neox: bool) -> None:
    """`rotate` along dim 1 of [num_kv_heads, head_size, num_keys], in place; in float32, rounded
    once. Few operations: each costs two threads' waking up."""
    num_heads, head_size, num_keys = k.shape
    half = cos.shape[0]
    if not is_neox or 2 * half != head_size:
        k.copy_(rotate(k.float(), cos[None], sines[1:], is_neox=is_neox, dim=1))
        return
    # [a b] cos + [b a] [-sin sin], both halves at once
    aba = scratch.take("aba", (num_heads, 3, half, num_keys), torch.float32)
    aba[:, :2] = k.view(num_heads, 2, half, num_keys)
    aba[:, 2] = aba[:, 0]
    turned = scratch.take("turned", (num_heads, 2, half, num_keys), torch.float32)
    torch.mul(aba[:, :2], cos, out=turned)
    turned.addcmul_(aba[:, 1:], sines)
    k.copy_(turned.view(k.shape))
