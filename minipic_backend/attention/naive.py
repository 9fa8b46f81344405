"""The specification: attention over segments in plain PyTorch, one request at a time.

    position of key j as query i sees it
        i and j in the same span, or j in i's frame:  the cached position of j
        i in the prefix or a dependent segment:       the logical position of j
    score(i, j) = scale * (R_{t_i} q_i) . (R_{p_ij} k_j)      t_i: the cached position of i

`unrotated` caches k_j as it is. `span_local` caches R_{c_j} k_j, c_j the cached position of j, and
its queries come rotated by t_i; as R_a R_b = R_{a+b}, the same score is

    (R_{-(p_ij - c_j)} R_{t_i} q_i) . (R_{c_j} k_j)
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from minipic_backend.attention.rotary import Rotary
from minipic_backend.config import KeyEncoding
from minipic_backend.spans.segments import Segment, SegmentKind, SegmentTable

__all__ = ["naive_rotate", "naive_span_attention", "naive_varlen_attention", "visibility"]


def naive_rotate(x: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """R_p x, without mscale.

    Args:
        x: [num_tokens, num_heads, head_size]; dims from rotary_dim on pass through.
        positions: [num_tokens], whole numbers, negative ones turn backwards.
        rotary: the table, of any float dtype.
    """
    half = rotary.rotary_dim // 2
    table = rotary.cos_sin.to(x.dtype)[positions.abs().long()]
    cos = table[:, None, :half]
    sin = table[:, None, half:] * positions.sign().to(x.dtype)[:, None, None]
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    if rotary.is_neox:
        a, b = rotated[..., :half], rotated[..., half:]
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((rotated, rest), dim=-1)


def visibility(table: SegmentTable | None, start: int, end: int) -> Tensor:
    """Which tokens the tokens [start, end) see: bool, [end - start, end].

    A span's see their frame and their own span, a prefix's the whole prefix in front of them; all
    others every token that is not hidden. From a patch on, what it replaces is hidden; the patch
    itself sees what stands logically in front.
    """
    query = torch.arange(start, end)[:, None]
    key = torch.arange(end)[None, :]
    causal = key <= query
    if table is None:
        return causal
    shown = causal & torch.from_numpy(table.visible(0, end))[None, :]
    position = torch.from_numpy(table.logical_positions(0, end))[None, :]
    for patch in table.segments:
        if patch.replaced is not None:
            is_replaced = (key >= patch.replaced[0]) & (key < patch.replaced[1])
            shown &= (query < patch.start) | ~is_replaced
            in_patch = (query >= patch.start) & (query < patch.end)
            own = causal & (key >= patch.start) & (key < patch.end - patch.num_pads)
            in_front = shown & (key < patch.start) & (position < patch.offset)
            shown = torch.where(in_patch, own | in_front, shown)
    if (first := table.segments[0]).kind is SegmentKind.PREFIX:
        shown = torch.where(query < first.end, causal, shown)
    for span in _spans(table):
        in_span = (query >= span.start) & (query < span.end)
        own = causal & ((key < table.num_frame_tokens) | (key >= span.start))
        shown = torch.where(in_span, own, shown)
    return shown


def naive_span_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: SegmentTable | None,
    query_start: int,
    *,
    encoding: KeyEncoding,
    rotary: Rotary,
    scale: float,
    soft_cap: float = 0.0,
    window: int = 0,
) -> Tensor:
    """Attention of the tokens [query_start, query_start + num_queries) of one request.

    Args:
        query: [num_queries, num_heads, head_size]: for "span_local" rotated by the cached
            positions, as a model does it (mscale included); for "unrotated" not rotated.
        key: [num_tokens, num_kv_heads, head_size], as cached; num_tokens ends with the last query.
        value: like key.
        table: the prompt's segments; None for an ordinary prompt.
        query_start: index of the first query in its request.
        encoding: how keys are cached.
        rotary: of the layer.
        scale: factor on the scores.
        soft_cap: cap * tanh(score / cap) where > 0.
        window: keys `window` or more positions back are not seen, where > 0.

    Returns:
        [num_queries, num_heads, head_size], the dtype of `query`; 0 where nothing is seen.
    """
    num_tokens, num_queries = key.shape[0], query.shape[0]
    if query_start + num_queries != num_tokens:
        raise ValueError(f"{num_tokens} keys do not end with the last of {num_queries} queries")
    cached = _positions(table, num_tokens, logical=False).to(key.device)
    logical = _positions(table, num_tokens, logical=True).to(key.device)
    shown = visibility(table, query_start, num_tokens).to(key.device)
    group = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group, dim=1)
    value = value.repeat_interleave(group, dim=1)
    if encoding == "unrotated":
        key, query = _mscaled(key, rotary), _mscaled(query, rotary)

    out = torch.empty_like(query)
    for i in range(num_queries):
        token = query_start + i
        seen = cached if _in_span(table, token) else logical
        if encoding == "unrotated":
            q = naive_rotate(query[i : i + 1], cached[token : token + 1], rotary)
            k = naive_rotate(key, seen, rotary)
        else:
            q = naive_rotate(query[i : i + 1].expand(num_tokens, -1, -1), cached - seen, rotary)
            k = key
        scores = scale * (q * k).sum(-1)  # [num_tokens, num_heads]
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        mask = shown[i]
        if window > 0:
            mask = mask & (cached[token] - seen < window)
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
        weights = torch.softmax(scores, dim=0).nan_to_num(0.0)
        # Tokens that are not seen may hold anything, NaN too.
        out[i] = (weights[mask, :, None] * value[mask]).sum(0)
    return out


def _mscaled(x: Tensor, rotary: Rotary) -> Tensor:
    factor = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    factor[: rotary.rotary_dim] = rotary.mscale
    return x * factor


def _spans(table: SegmentTable) -> list[Segment]:
    return [segment for segment in table.segments if segment.kind is SegmentKind.SPAN]


def _in_span(table: SegmentTable | None, token: int) -> bool:
    return table is not None and any(span.start <= token < span.end for span in _spans(table))


def _positions(table: SegmentTable | None, num_tokens: int, *, logical: bool) -> Tensor:
    if table is None:
        return torch.arange(num_tokens)
    positions = table.logical_positions if logical else table.cached_positions
    return torch.from_numpy(positions(0, num_tokens))


def naive_varlen_attention(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    softcap: float,
    out: Tensor,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """What `flash_attn_varlen_func` computes, over a paged cache or over keys in a row."""
    bounds = cu_seqlens_q.tolist()
    assert max_seqlen_q == max(b - a for a, b in pairwise(bounds))
    if block_table is not None:
        assert seqused_k is not None
        size = k.shape[1]
        counts = seqused_k.tolist()
        used = [row[: -(-n // size)].long() for row, n in zip(block_table, counts, strict=True)]
        pairs = [
            (k[blocks].flatten(0, 1)[:n], v[blocks].flatten(0, 1)[:n])
            for blocks, n in zip(used, counts, strict=True)
        ]
    else:
        assert cu_seqlens_k is not None
        pairs = [(k[a:b], v[a:b]) for a, b in pairwise(cu_seqlens_k.tolist())]
    assert max_seqlen_k == max(len(keys) for keys, _ in pairs)
    for (lo, hi), pair in zip(pairwise(bounds), pairs, strict=True):
        keys, values = (
            x.double().repeat_interleave(q.shape[1] // k.shape[-2], dim=1) for x in pair
        )
        num_keys = len(keys)
        scores = torch.einsum("qhd,khd->hqk", q[lo:hi].double(), keys) * softmax_scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if causal:
            last = torch.arange(num_keys - (hi - lo), num_keys, device=q.device)[:, None]
            scores.masked_fill_(torch.arange(num_keys, device=q.device) > last, -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        out[lo:hi] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    return out
