"""Requests with random segments, laid out in a paged cache whose unused slots are NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from minipic_backend.attention.naive import naive_rotate, naive_span_attention
from minipic_backend.attention.rotary import Rotary, cos_sin_table
from minipic_backend.attention.rows import QueryRows, RowSegments, Run, split_runs
from minipic_backend.config import KeyEncoding, SpanConfig, SpanOptions
from minipic_backend.spans.patches import Patch
from minipic_backend.spans.segments import SegmentKind, SegmentTable, parse_segments

SSEP, PDEP, PAD = 1, 2, 3


def make_table(
    prefix: int, spans: Sequence[int], question: int, block_size: int, **options: object
) -> SegmentTable | None:
    """A prompt of a prefix (0: none), spans and a question of so many tokens, before padding."""
    tokens: list[int] = []

    def add(length: int, marker: int | None, pad: int) -> None:
        if length:
            tokens.extend([marker or 9] + [9] * (length - 1))
            tokens.extend([pad] * (-len(tokens) % block_size))

    add(prefix, None, 8)
    for length in spans:
        add(length, SSEP, PAD)
    if question:
        tokens.extend([PDEP] + [9] * (question - 1))
    config = SpanConfig(SSEP, PDEP, PAD, block_size)
    return parse_segments(np.asarray(tokens), config, SpanOptions(**options))  # type: ignore[arg-type]


def make_patched(
    prefix: int,
    spans: Sequence[int],
    patches: Sequence[tuple[int, int, int]],
    question: int,
    block_size: int,
    **options: object,
) -> SegmentTable:
    """As `make_table`, with (span, first, last + 1) tokens computed anew in front of the question;
    a fourth number is the length of the patch, where it is shorter."""
    plain = make_table(prefix, spans, 1, block_size)
    assert plain is not None
    at = plain.last.start
    tokens = [8] * at
    for segment in plain.segments:
        if segment.kind is SegmentKind.SPAN:
            pads = segment.num_pads
            tokens[segment.start : segment.end] = [
                SSEP, *[9] * (segment.num_tokens - pads - 1), *[PAD] * pads
            ]  # fmt: skip
    first_span = int(plain.segments[0].kind is not SegmentKind.SPAN)
    made = []
    for span, lo, hi, *length in patches:
        start = plain.segments[first_span + span].start
        made.append(Patch(len(tokens), start + lo, start + hi))
        tokens += [9] * (length[0] if length else hi - lo)
        tokens += [PAD] * (-len(tokens) % block_size)
    tokens += [PDEP] + [9] * (question - 1)
    config = SpanConfig(SSEP, PDEP, PAD, block_size)
    chosen = SpanOptions(patches=tuple(made), **options)  # type: ignore[arg-type]
    table = parse_segments(np.asarray(tokens), config, chosen)
    assert table is not None
    return table


def _all_seen(table: SegmentTable) -> SegmentTable:
    return replace(table, options=replace(table.options, seen_prefix=None))


@dataclass
class Heads:
    num_heads: int = 2
    num_kv_heads: int = 1
    head_size: int = 32
    rotary_dim: int = 32
    is_neox: bool = True
    mscale: float = 1.0

    def rotary(self) -> Rotary:
        inv_freq = 1.0 / 100.0 ** (torch.arange(0, self.rotary_dim, 2) / self.rotary_dim)
        return Rotary(cos_sin_table(inv_freq, 4096), self.is_neox, self.mscale)


@dataclass
class Request:
    """Tokens [start, end) of a prompt are computed in this step; all before are cached."""

    table: SegmentTable | None
    start: int
    end: int


class Batch:
    """Random q, k, v of requests; what the kernels get of them, and what must come out."""

    def __init__(
        self,
        requests: Sequence[Request],
        heads: Heads,
        encoding: KeyEncoding,
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        query_dtype: torch.dtype | None = None,
        cache_dtype: torch.dtype | None = None,
        q_scale: float = 1.0,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        device: str = "cpu",
        seed: int = 0,
        spare: int = 2,
    ) -> None:
        torch.manual_seed(seed)
        self.requests, self.heads, self.encoding = list(requests), heads, encoding
        self.block_size, self.device = block_size, device
        self.q_scale, self.k_scale, self.v_scale = q_scale, k_scale, v_scale
        cache_dtype = cache_dtype or dtype
        exact = heads.rotary()  # of the specification, on the CPU
        self.exact_rotary = exact
        self.rotary = replace(exact, cos_sin=exact.cos_sin.to(device))
        num_blocks = [-(-r.end // block_size) for r in requests]
        order = torch.randperm(sum(num_blocks) + spare)
        nan = torch.full(
            (len(order), block_size, 2, heads.num_kv_heads, heads.head_size), torch.nan
        ).to(cache_dtype)
        cache = nan.clone()
        self.tables: list[list[int]] = []
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        positions = []
        taken = 0
        for request, count in zip(requests, num_blocks, strict=True):
            blocks = order[taken : taken + count].tolist()
            taken += count
            self.tables.append(blocks)
            cached = self._cached_positions(request.table, request.end)
            k = torch.randn(request.end, heads.num_kv_heads, heads.head_size)
            v = torch.randn(request.end, heads.num_kv_heads, heads.head_size)
            q = torch.randn(request.end - request.start, heads.num_heads, heads.head_size)
            if encoding == "span_local":
                k, q = (
                    naive_rotate(k, cached, exact),
                    naive_rotate(q, cached[request.start :], exact),
                )
            k = (k / k_scale).to(cache_dtype)
            v = (v / v_scale).to(cache_dtype)
            slots = torch.arange(request.end)
            rows = torch.tensor(blocks)[slots // block_size]
            cache[rows, slots % block_size, 0] = k
            cache[rows, slots % block_size, 1] = v
            if request.table is not None:  # what no one may see holds NaN
                hidden = torch.from_numpy(~request.table.visible(0, request.end))
                hidden[request.start :] = False
                for span in request.table.segments:  # spans see all of their frame
                    if span.kind is SegmentKind.SPAN and request.start < span.end:
                        hidden[: request.table.num_frame_tokens] = False
                for segment in request.table.segments:  # a span's own tokens see its marker
                    if segment.start < request.start < segment.end:
                        hidden[segment.start : segment.end] = False
                for patch in request.table.segments:
                    if patch.replaced and patch.start <= request.start:
                        hidden[slice(*patch.replaced)] = True
                cache[rows[hidden], slots[hidden] % block_size] = nan[0, 0]
            self.keys.append(k.double() * k_scale)
            self.values.append(v.double() * v_scale)
            self.queries.append((q / q_scale).to(query_dtype or dtype))
            positions.append(cached[request.start :])
        self.query = torch.cat(self.queries).to(device)
        self.positions = torch.cat(positions).to(device)
        cache = cache.to(device)
        self.key_cache, self.value_cache = cache[:, :, 0], cache[:, :, 1]
        self.out = torch.full(self.query.shape, torch.nan, dtype=dtype, device=device)

    @staticmethod
    def _cached_positions(table: SegmentTable | None, end: int) -> Tensor:
        if table is None:
            return torch.arange(end)
        return torch.from_numpy(table.cached_positions(0, end))

    def runs(self) -> list[tuple[int, Run]]:
        """(request, run) of every run, in the order of the packed batch."""
        return [
            (i, run)
            for i, request in enumerate(self.requests)
            for run in split_runs(request.table, request.start, request.end)
        ]

    def query_start(self, request: int, token: int) -> int:
        """Index of a token in the packed batch."""
        before = sum(r.end - r.start for r in self.requests[:request])
        return before + token - self.requests[request].start

    def block_table(self) -> Tensor:
        width = max(len(blocks) for blocks in self.tables)
        table = torch.zeros(len(self.tables), width, dtype=torch.int32)
        for row, blocks in zip(table, self.tables, strict=True):
            row[: len(blocks)] = torch.tensor(blocks)
        return table.to(self.device)

    def rows(self, spans: bool = True) -> tuple[QueryRows, RowSegments]:
        """One row per run; without the runs of spans if not `spans`."""
        runs = [x for x in self.runs() if spans or x[1].kind is not SegmentKind.SPAN]
        starts = [self.query_start(i, run.start) for i, run in runs]
        lengths = [run.num_tokens for _, run in runs]
        rows = QueryRows(
            query_start=self._int(starts),
            query_end=self._int([s + n for s, n in zip(starts, lengths, strict=True)]),
            seq_lens=self._int([run.end for _, run in runs]),
            block_table=self.block_table()[[i for i, _ in runs]],
            max_query_len=max(lengths),
            num_tokens=len(self.query),
        )
        return rows, RowSegments.pack([run.seen for _, run in runs], self.device)

    def expected(self, scale: float, soft_cap: float = 0.0, window: int = 0) -> Tensor:
        """The specification in float64, from the very values that the cache holds."""
        outs = [
            naive_span_attention(
                q.double() * self.q_scale, k, v, r.table, r.start, encoding=self.encoding,
                rotary=self.exact_rotary, scale=scale, soft_cap=soft_cap, window=window,
            )
            for r, q, k, v in zip(self.requests, self.queries, self.keys, self.values, strict=True)
        ]  # fmt: skip
        return torch.cat(outs)

    def is_pad(self) -> Tensor:
        """Which queries of the batch are pads, whose output no one reads."""
        hidden = [
            torch.zeros(r.end - r.start, dtype=torch.bool)
            if r.table is None
            else ~torch.from_numpy(_all_seen(r.table).visible(r.start, r.end))
            for r in self.requests
        ]
        return torch.cat(hidden)

    def _int(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
