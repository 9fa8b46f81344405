"""Dependent queries through a stock varlen attention: virtual sequences (`span_local` only).

A query that sees several segments is copied, once per segment, turned by R_{-shift}; the copies of
a segment's queries are one sequence over the blocks of that segment. Two calls serve all of them:

    causal      the queries themselves, over their own segment
    not causal  their copies, over the segments in front of it

and the partial outputs are merged by their log-sum-exp. The attention function is handed in:
`vllm.vllm_flash_attn.flash_attn_varlen_func`, or a naive one in tests. Spans that are being
computed are virtual sequences too, of the plainest kind: `sequences.context_sequences`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minipic_backend.attention.geometry import next_power_of_2
from minipic_backend.attention.kernels.copies import copy_kernel, merge_copies_kernel
from minipic_backend.attention.rotary import Rotary
from minipic_backend.attention.rows import PlacedRun, Run, upload
from minipic_backend.attention.sequences import (
    KeyRange,
    Sequences,
    joined,
    make_sequences,
)

__all__ = [
    "Attend",
    "VirtualPlan",
    "plan_virtual",
    "virtual_attention",
]


class Attend(Protocol):
    """A varlen attention over a paged cache, with FlashAttention's argument names.

    Causal masks are aligned to the last key. Returns the output, also written to `out`, and the
    natural log-sum-exp, [num_heads, num_queries].
    """

    def __call__(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        seqused_k: Tensor,
        max_seqlen_k: int,
        block_table: Tensor,
        softmax_scale: float,
        causal: bool,
        softcap: float,
        out: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class VirtualPass:
    """As many queries as there is room for copies; tensors int32, on the device.

    Args:
        own: sequences of the queries over their own segments, causal.
        earlier: sequences of the copies, not causal; None: there are no copies.
        source: [num_own + num_copies], query in the batch that each row of the buffer is made of.
        shift: [num_own + num_copies], by how much it is turned back; 0 for the queries.
        first: [num_own], first copy of each query.
        step: [num_own], from a copy of a query to its next.
        count: [num_own], copies of each query.
    """

    own: Sequences
    earlier: Sequences | None
    source: Tensor
    shift: Tensor
    first: Tensor
    step: Tensor
    count: Tensor

    @property
    def num_own(self) -> int:
        return int(self.first.shape[0])


@dataclass(frozen=True, slots=True)
class VirtualPlan:
    """Passes, one after another, that share a buffer for copies."""

    passes: tuple[VirtualPass, ...]


def plan_virtual(
    runs: Sequence[PlacedRun], block_table: Tensor, block_size: int, max_copies: int
) -> VirtualPlan:
    """Plans dependent runs; on the host, with one upload per tensor.

    Args:
        runs: each sees segments that start at a block (no hidden markers).
        block_table: [num_requests, max_blocks].
        block_size: tokens of a block.
        max_copies: rows of the buffer of copies; a run that needs more is cut.
    """
    passes: list[VirtualPass] = []
    pending: list[PlacedRun] = []
    room = max_copies
    for placed in runs:
        need = len(joined(placed.run.seen))  # rows per query
        start, query = placed.run.start, placed.query
        while start < placed.run.end:
            if room < need and pending:
                passes.append(_pass(pending, block_table, block_size))
                pending, room = [], max_copies
            count = min(placed.run.end - start, max(room // need, 1))
            piece = _slice(placed.run, start, start + count)
            pending.append(PlacedRun(placed.request, query, piece))
            start, query, room = start + count, query + count, room - count * need
    if pending:
        passes.append(_pass(pending, block_table, block_size))
    return VirtualPlan(tuple(passes))


def virtual_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: VirtualPlan,
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
        plan: of this batch.
        rotary: of this layer. mscale is in `query` already and not used.
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
    for part in plan.passes:
        copies = _turned_copies(query, part, rotary)
        partial = torch.empty_like(copies)
        lse: list[Tensor] = []
        for sequences, causal, lo, hi in (
            (part.own, True, 0, part.num_own),
            (part.earlier, False, part.num_own, copies.shape[0]),
        ):
            if sequences is None:
                continue
            _, part_lse = attend(
                q=copies[lo:hi],
                k=key_cache,
                v=value_cache,
                cu_seqlens_q=sequences.cu_seqlens_q,
                max_seqlen_q=sequences.max_seqlen_q,
                seqused_k=sequences.seqused_k,
                max_seqlen_k=sequences.max_seqlen_k,
                block_table=sequences.block_table,
                softmax_scale=scale,
                causal=causal,
                softcap=soft_cap,
                out=partial[lo:hi],
            )
            lse.append(part_lse)
        _merge(out, partial, lse[0], lse[-1], part)
    return out


def _turned_copies(query: Tensor, part: VirtualPass, rotary: Rotary) -> Tensor:
    num_heads, head_size = query.shape[1:]
    num_copies = part.source.shape[0]
    copies = query.new_empty((num_copies, num_heads, head_size))
    block_heads = min(32, next_power_of_2(num_heads))
    copy_kernel[(num_copies, -(-num_heads // block_heads))](
        query,
        copies,
        part.source,
        part.shift,
        rotary.cos_sin,
        num_heads,
        query.stride(0),
        query.stride(1),
        copies.stride(0),
        copies.stride(1),
        HEAD_SIZE=head_size,
        ROTARY_DIM=rotary.rotary_dim,
        IS_NEOX=rotary.is_neox,
        BLOCK_HEADS=block_heads,
        BLOCK_D=next_power_of_2(head_size),
        num_warps=4,
    )
    return copies


def _merge(out: Tensor, partial: Tensor, own_lse: Tensor, lse: Tensor, part: VirtualPass) -> None:
    num_heads, head_size = out.shape[1:]
    merge_copies_kernel[(part.num_own, num_heads)](
        out,
        partial,
        own_lse,
        lse,
        part.source,
        part.first,
        part.step,
        part.count,
        part.num_own,
        out.stride(0),
        out.stride(1),
        partial.stride(0),
        partial.stride(1),
        own_lse.stride(1),
        own_lse.stride(0),
        lse.stride(1),
        lse.stride(0),
        HEAD_SIZE=head_size,
        BLOCK_D=next_power_of_2(head_size),
        BLOCK_PARTS=16,
        num_warps=2,
    )


def _slice(run: Run, start: int, end: int) -> Run:
    return Run(run.kind, start, end, run.segment_start, run.num_frame_tokens, run.seen)


def _pass(runs: Sequence[PlacedRun], block_table: Tensor, block_size: int) -> VirtualPass:
    own: list[KeyRange] = []
    earlier: list[KeyRange] = []
    own_source: list[NDArray[np.int32]] = []
    copy_source: list[NDArray[np.int32]] = []
    copy_shift: list[NDArray[np.int32]] = []
    fields: list[NDArray[np.int32]] = []
    num_copies = 0
    for placed in runs:
        run, n = placed.run, placed.run.num_tokens
        *others, last = joined(run.seen)
        own.append(KeyRange(placed.request, n, last.start, run.end - last.start))
        queries = np.arange(placed.query, placed.query + n, dtype=np.int32)
        own_source.append(queries)
        fields.append(np.stack((num_copies + np.arange(n), np.full(n, n), np.full(n, len(others)))))
        for segment in others:
            num_keys = segment.end - segment.start
            earlier.append(KeyRange(placed.request, n, segment.start, num_keys))
            copy_source.append(queries)
            copy_shift.append(np.full(n, segment.shift, dtype=np.int32))
        num_copies += n * len(others)
    device = block_table.device
    num_own = sum(len(queries) for queries in own_source)
    first, step, count = upload(np.concatenate(fields, axis=1), device).unbind(0)
    return VirtualPass(
        make_sequences(own, block_table, block_size),
        make_sequences(earlier, block_table, block_size) if earlier else None,
        upload(np.concatenate(own_source + copy_source), device),
        upload(np.concatenate([np.zeros(num_own, dtype=np.int32), *copy_shift]), device),
        first,
        step,
        count,
    )
