"""The CPU's attention of dependent runs (of all runs with keys that are not rotated), against the
definition token by token in float64, over random prompts, cuts and caches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from segment_prompts import CONFIG, Drawn, all_options, given, patched_prompts, prompts

from minipic_backend.attention import gathered as gathered_module
from minipic_backend.attention.gathered import GatheredRun, Scratch, gather_run, gathered_attention
from minipic_backend.attention.kv_layout import BlockLayout, Selection, probe_layout
from minipic_backend.attention.rotary import Rotary, cos_sin_table, rotate
from minipic_backend.attention.rows import PlacedRun, Run, split_runs
from minipic_backend.attention.sequences import context_sequences
from minipic_backend.config import SpanConfig, SpanOptions
from minipic_backend.spans.patches import Patch
from minipic_backend.spans.segments import SegmentKind, SegmentTable, parse_segments

SIZE = CONFIG.block_size
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 12
SCALE = 0.4
NUM_GENERATED = 5
GARBAGE = 1e4


class Poisoned(Scratch):
    """As other layers and runs leave it: what is not written over shows."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return super().take(name, shape, dtype).fill_(torch.nan)


SCRATCH = Poisoned()
"""Shared by every run, shape and dtype in here, as by those of an engine."""


@dataclass
class Layer:
    """Queries, keys and values of one layer before rotation: float64 [tokens, heads, head_size]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rotary: Rotary

    @classmethod
    def draw(cls, num_tokens: int, *, rotary_dim: int, is_neox: bool, mscale: float) -> Layer:
        generator = torch.Generator().manual_seed(num_tokens)
        query, key, value = (
            torch.randn(num_tokens, heads, HEAD_SIZE, generator=generator, dtype=torch.float64)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        inv_freq = 100.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
        return cls(query, key, value, Rotary(cos_sin_table(inv_freq, 256), is_neox, mscale))

    def turned(self, x: torch.Tensor, positions: torch.Tensor, *, scaled: bool) -> torch.Tensor:
        """R_p x, with the model's factor on what is rotated."""
        cos, sin = self.rotary.cos_sin.double()[positions][:, None].chunk(2, dim=-1)
        x = rotate(x, cos, sin, is_neox=self.rotary.is_neox)
        if scaled:
            x = x.clone()
            x[..., : self.rotary.rotary_dim] *= self.rotary.mscale
        return x


def by_definition(layer: Layer, table: SegmentTable | None, soft_cap: float = 0.0) -> torch.Tensor:
    """Attention of every token: float64 [tokens, heads, head_size]. Loops, and no cleverness."""
    num_tokens = len(layer.query)
    if table is None:
        cached = logical = list(range(num_tokens))
        visible, owner, frame = [True] * num_tokens, [None] * num_tokens, 0
    else:
        cached = table.cached_positions(0, num_tokens).tolist()
        logical = table.logical_positions(0, num_tokens).tolist()
        visible = table.visible(0, num_tokens).tolist()
        frame = table.num_frame_tokens
        owner = [
            next(
                (
                    s
                    for s in table.segments
                    if s.kind is SegmentKind.SPAN and s.start <= token < s.end
                ),
                None,
            )
            for token in range(num_tokens)
        ]
    out = torch.zeros_like(layer.query)
    group = HEADS // KV_HEADS
    for i in range(num_tokens):
        span = owner[i]
        if span is None:
            in_prefix = table is not None and table.segments[0].kind is SegmentKind.PREFIX
            own = table.segments[0].end if table is not None and in_prefix else 0
            seen = [j for j in range(i + 1) if visible[j] or i < own]
            if table is not None:
                seen = seen_past_patches(table, i, seen)
            positions = logical
        else:
            seen = [j for j in range(i + 1) if j < frame or j >= span.start]
            positions = cached
        q = layer.turned(layer.query[i : i + 1], torch.tensor(cached[i : i + 1]), scaled=True)
        at = torch.tensor([positions[j] for j in seen], dtype=torch.int64)
        k = layer.turned(layer.key[seen], at, scaled=True).repeat_interleave(group, dim=1)
        scores = SCALE * (q * k).sum(-1)  # [seen, heads]
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = scores.softmax(0)[..., None]
        out[i] = (weights * layer.value[seen].repeat_interleave(group, dim=1)).sum(0)
    return out


def seen_past_patches(table: SegmentTable, token: int, seen: list[int]) -> list[int]:
    """Of the visible tokens up to `token`, those that it sees in a prompt with patches."""
    patches = [s for s in table.segments if s.replaced is not None and s.start <= token]
    gone = {j for patch in patches for j in range(*patch.replaced)}
    seen = [j for j in seen if j not in gone]
    for own in patches:
        if token < own.end:  # a patch sees its own marker, and what is logically in front of it
            first = own.start
            logical = table.logical_positions(0, first)
            seen = [j for j in seen if j > first or (j < first and logical[j] < own.offset)]
            is_empty = own.num_pads == own.num_tokens
            return seen if is_empty else sorted([*seen, first])
    return seen


@dataclass
class Cache:
    """Blocks in memory, scattered and packed somehow, with garbage where nothing was written."""

    keys: torch.Tensor
    values: torch.Tensor
    block_table: torch.Tensor
    layout: BlockLayout

    @classmethod
    def fill(cls, keys: torch.Tensor, values: torch.Tensor, *, row: int = 1) -> Cache:
        """keys, values: [tokens, kv_heads, head_size]. The request is row 1 of 2 in the table."""
        num_blocks = -(-len(keys) // SIZE)
        generator = torch.Generator().manual_seed(num_blocks)
        places = torch.randperm(num_blocks + 3, generator=generator)[:num_blocks]
        orders = [torch.randperm(SIZE * HEAD_SIZE, generator=generator) for _ in range(2)]
        packed = []
        for numbers, order in zip((keys, values), orders, strict=True):
            memory = torch.full((num_blocks + 3, KV_HEADS, SIZE, HEAD_SIZE), GARBAGE)
            filled = torch.full((num_blocks * SIZE, KV_HEADS, HEAD_SIZE), GARBAGE)
            filled[: len(numbers)] = numbers.float()
            blocks = filled.view(num_blocks, SIZE, KV_HEADS, HEAD_SIZE).transpose(1, 2)
            memory[places] = blocks.flatten(2)[..., order].view(blocks.shape)
            packed.append(memory)

        def write(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return numbers.flatten()[orders[0]], numbers.flatten()[orders[1]]

        table = torch.full((2, num_blocks), num_blocks + 2, dtype=torch.int32)
        table[row] = places
        return cls(packed[0], packed[1], table, probe_layout(write, SIZE, HEAD_SIZE))


def attend(
    layer: Layer,
    table: SegmentTable | None,
    runs: list[Run],
    *,
    encoding: str,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> torch.Tensor:
    """What the CPU backend does for these runs; NaN in the rows of all other tokens."""
    unrotated = encoding == "unrotated"
    num_tokens = len(layer.query)
    cached = (
        torch.arange(num_tokens)
        if table is None
        else torch.from_numpy(table.cached_positions(0, num_tokens))
    )
    query, key = layer.query, layer.key
    if not unrotated:
        query, key = (layer.turned(x, cached, scaled=True) for x in (query, key))
    cache = Cache.fill(key, layer.value)
    out = torch.full(layer.query.shape, torch.nan)
    for run in runs:
        gathered = gather_run(
            PlacedRun(1, run.start, run),
            cache.block_table,
            SIZE,
            unrotated=unrotated,
            scratch=SCRATCH,
        )
        assert gathered.num_queries == run.num_tokens
        out[run.start : run.end] = gathered_attention(
            query[run.start : run.end].to(dtype), cache.keys.to(dtype), cache.values.to(dtype),
            gathered, cache.layout, layer.rotary, SCALE, **kwargs,
        )  # fmt: skip
    return out


def draw_layer(
    table: SegmentTable | None, num_tokens: int, style: tuple[int, bool, float]
) -> Layer:
    rotary_dim, is_neox, mscale = style
    return Layer.draw(num_tokens, rotary_dim=rotary_dim, is_neox=is_neox, mscale=mscale)


any_prompts = st.one_of(prompts(max_segments=4), patched_prompts(max_segments=4, places=True))
styles = st.sampled_from(
    [(HEAD_SIZE, True, 1.0), (HEAD_SIZE, False, 1.0), (6, True, 1.0), (6, False, 1.3)]
)


@given(any_prompts, all_options, st.sampled_from(["span_local", "unrotated"]), styles)
def test_dependent_runs(
    drawn: Drawn, options: SpanOptions, encoding: str, style: tuple[int, bool, float]
) -> None:
    table = drawn.table(options)
    num_tokens = len(drawn.token_ids) + NUM_GENERATED
    layer = draw_layer(table, num_tokens, style)
    runs = split_runs(table, 0, num_tokens)
    if encoding == "span_local":
        runs = [run for run in runs if run.kind is SegmentKind.DEPENDENT]
    got = attend(layer, table, runs, encoding=encoding)
    want = by_definition(layer, table)
    for run in runs:
        torch.testing.assert_close(
            got[run.start : run.end].double(), want[run.start : run.end], rtol=0, atol=2e-5
        )


@given(any_prompts, all_options, st.data())
def test_runs_of_chunks_cover_each_token_once_and_see_the_same(
    drawn: Drawn, options: SpanOptions, data: st.DataObject
) -> None:
    table = drawn.table(options)
    end = len(drawn.token_ids) + NUM_GENERATED
    whole = {token: run.seen for run in split_runs(table, 0, end) for token in _tokens(run)}
    cuts = sorted({0, end, *data.draw(st.lists(st.integers(0, end), max_size=6))})
    runs = [run for lo, hi in pairwise(cuts) for run in split_runs(table, lo, hi)]
    tokens = [token for run in runs for token in _tokens(run)]
    assert tokens == list(range(end))
    assert {token: run.seen for run in runs for token in _tokens(run)} == whole


@given(any_prompts, all_options, st.sampled_from(["span_local", "unrotated"]))
def test_chunks_attend_as_the_whole_does(drawn: Drawn, options: SpanOptions, encoding: str) -> None:
    table = drawn.table(options)
    num_tokens = len(drawn.token_ids) + NUM_GENERATED
    layer = draw_layer(table, num_tokens, (HEAD_SIZE, True, 1.0))
    want = by_definition(layer, table)
    for chunk in (1, 3):
        runs = [
            run
            for start in range(0, num_tokens, chunk)
            for run in split_runs(table, start, min(start + chunk, num_tokens))
            if encoding == "unrotated" or run.kind is SegmentKind.DEPENDENT
        ]
        got = attend(layer, table, runs, encoding=encoding)
        for run in runs:
            torch.testing.assert_close(
                got[run.start : run.end].double(), want[run.start : run.end], rtol=0, atol=2e-5
            )


@given(any_prompts, all_options, st.data())
def test_context_runs_are_causal_sequences_over_their_blocks(
    drawn: Drawn, options: SpanOptions, data: st.DataObject
) -> None:
    """What vLLM's own kernel is told of prefixes and spans, under `span_local`."""
    table = drawn.table(options)
    end = len(drawn.token_ids)
    start = data.draw(st.integers(0, end - 1))
    runs = [
        PlacedRun(1, run.start - start, run)
        for run in split_runs(table, start, end)
        if run.kind is not SegmentKind.DEPENDENT
    ]
    if not runs:
        return
    num_blocks = -(-end // SIZE)
    blocks = torch.arange(100, 100 + num_blocks, dtype=torch.int32)
    block_table = torch.stack([torch.full_like(blocks, 7), blocks])
    sequences = context_sequences(runs, block_table, SIZE)
    frame = table.num_frame_tokens
    assert sequences.cu_seqlens_q.diff().tolist() == [placed.run.num_tokens for placed in runs]
    for row, placed in enumerate(runs):
        run = placed.run
        (segment,) = [s for s in table.segments if s.start <= run.start < s.end]
        own = list(range(segment.start, run.end))
        keys = [*range(frame), *own] if run.kind is SegmentKind.SPAN else own
        num_keys = int(sequences.seqused_k[row])
        slots = [
            int(sequences.block_table[row, i // SIZE]) * SIZE + i % SIZE for i in range(num_keys)
        ]
        assert slots == [(100 + key // SIZE) * SIZE + key % SIZE for key in keys]
        # The i-th key stands at cached position i: an ordinary causal sequence.
        assert [int(table.cached_positions(key, key + 1)[0]) for key in keys] == list(
            range(num_keys)
        )


@pytest.fixture
def in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that multiplies bf16: the same numbers, at whatever speed."""
    monkeypatch.setattr(gathered_module, "multiplies_bf16", lambda: True)


def as_bf16(layer: Layer) -> Layer:
    """The layer as a model in bf16 has it: numbers rounded before they are rotated."""
    query, key, value = (x.bfloat16().double() for x in (layer.query, layer.key, layer.value))
    return Layer(query, key, value, layer.rotary)


@given(any_prompts, all_options, styles, st.sampled_from([0, 2, 99]), st.sampled_from([3, 16]))
def test_dependent_runs_in_bf16(
    drawn: Drawn, options: SpanOptions, style: tuple[int, bool, float], few: int, step: int
) -> None:
    """Half a percent of the whole, and no row far off: queries, keys, turned keys, scores, weights
    and the output are each rounded to 2^-9. A wrong shift or mask is off by tenths."""
    table = drawn.table(options)
    num_tokens = len(drawn.token_ids) + NUM_GENERATED
    layer = as_bf16(draw_layer(table, num_tokens, style))
    runs = [r for r in split_runs(table, 0, num_tokens) if r.kind is SegmentKind.DEPENDENT]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathered_module, "multiplies_bf16", lambda: True)
        patch.setattr(gathered_module, "_FEW_QUERIES", few)
        patch.setattr(gathered_module, "_SAMPLE_STEP", step)
        got = attend(layer, table, runs, encoding="span_local", dtype=torch.bfloat16).double()
    want = by_definition(layer, table)
    mine = torch.zeros(num_tokens, dtype=torch.bool)
    for run in runs:
        mine[run.start : run.end] = True
    if mine.any():
        assert (got - want)[mine].norm() < 0.02 * want[mine].norm()
        torch.testing.assert_close(got[mine], want[mine], rtol=0, atol=0.1)


@pytest.mark.parametrize("encoding", ["span_local", "unrotated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefix", [(), (10, 10, 10, 10)])
@pytest.mark.parametrize("see_markers", [True, False])
def test_patches_of_nothing(
    in_bf16: None, encoding: str, dtype: torch.dtype, prefix: tuple[int, ...], see_markers: bool
) -> None:
    """With nothing in front, such a patch sees no token at all: 0, as the definition says."""
    parts = [(1, 11, 12, 13), (1, 12, 13, 3), (3, 3, 3, 3), (2, 10, 11)]
    first = len(prefix)
    drawn = Drawn(
        (prefix, *parts) if prefix else tuple(parts), (), (Patch(first + 8, first, first + 4),)
    )
    table = drawn.table(SpanOptions(see_markers=see_markers))
    num_tokens = len(drawn.token_ids)
    layer = as_bf16(draw_layer(table, num_tokens, (HEAD_SIZE, True, 1.0)))
    runs = split_runs(table, first, num_tokens)
    if encoding == "span_local":
        runs = [run for run in runs if run.kind is SegmentKind.DEPENDENT]
    got = attend(layer, table, runs, encoding=encoding, dtype=dtype)
    want = by_definition(layer, table)
    limit = 2e-5 if dtype == torch.float32 else 0.1
    for run in runs:
        own = slice(run.start, run.end)
        torch.testing.assert_close(got[own].double(), want[own], rtol=0, atol=limit)
    assert bool(prefix) == bool(want[first + 8 : first + 12].any())


def test_large_scores_in_bf16(in_bf16: None) -> None:
    """Scores of about 150 that differ by little: bf16 alone would round them to whole numbers."""
    table = Drawn(((10,) * 4, (1, 11, 12, 3), (2, 10, 11)), (0, 0, 0)).table(SpanOptions())
    layer = as_bf16(draw_layer(table, 11, (2, True, 1.0)))
    layer.query[:, :, -1] = layer.key[:, :, -1] = 19.375
    (run,) = [r for r in split_runs(table, 0, 11) if r.kind is SegmentKind.DEPENDENT]
    got = attend(layer, table, [run], encoding="span_local", dtype=torch.bfloat16)
    want = by_definition(layer, table)[run.start : run.end]
    error = (got[run.start : run.end].double() - want).abs().max()
    plain = SCALE * torch.einsum("qhd,khd->hqk", layer.query, layer.key.repeat_interleave(2, 1))
    assert plain.abs().min() > 128
    assert error < 0.03


@pytest.mark.parametrize("few", [True, False])
def test_strong_keys_that_the_sample_misses_in_bf16(few: bool) -> None:
    """Two scores of about 30 above every 16th key's: off by x / 256 each at most, as stated."""
    q = torch.zeros(1, 1, 8)
    q[..., :2] = 1.0
    k = torch.zeros(1, 9, 48)
    k[0, :2, 5] = torch.tensor([30.0, 0.06])
    k[0, :2, 9] = torch.tensor([30.0, -0.06])
    k[0, 8] = 1.0
    mask = torch.zeros(1, 0)
    run = GatheredRun(0, 1, Selection(torch.arange(1), 48, ((0, 48),)), None, None, mask)
    exact = torch.bmm(q.double(), k[:, :8].double()).softmax(-1)
    q, k, mask = q.bfloat16(), k.bfloat16(), mask.bfloat16()
    scores = gathered_module._scores_bf16(run, q, k[:, :8] if few else k, mask, 1.0)
    bound = 30.06 / 256
    assert (scores[0, 0, [5, 9]].double() - torch.tensor([30.06, 29.94])).abs().max() <= bound
    assert (scores.double().softmax(-1) - exact).abs().max() <= bound / 2


def test_scratch_is_bounded_by_the_largest_run() -> None:
    """Not by how many runs a step has, nor how many steps there were."""
    scratch = Scratch()
    for count in (5, 100, 7):
        for dtype in (torch.float32, torch.bfloat16):
            assert scratch.take("a", (count, 3), dtype).shape == (count, 3)
            scratch.take("b", (3, count), dtype)
    assert sum(held.numel() for held in scratch._held.values()) == 4 * 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_in_turns(
    in_bf16: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    table = Drawn(((10,) * 4, (1, 11, 12, 3), (2, 10, 11, 12, 13, 14)), (0, 1, 0)).table(
        SpanOptions()
    )
    layer = draw_layer(table, 14, (HEAD_SIZE, True, 1.0))
    runs = [run for run in split_runs(table, 0, 14) if run.kind is SegmentKind.DEPENDENT]
    want = attend(layer, table, runs, encoding="span_local", dtype=dtype)
    num_keys = 16
    for queries in (1, 4):
        monkeypatch.setattr(gathered_module, "_MAX_SCORES", queries * HEADS * num_keys)
        got = attend(layer, table, runs, encoding="span_local", dtype=dtype)
        limit = 1e-6 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(got[8:], want[8:], rtol=0, atol=limit)


@pytest.mark.parametrize("encoding", ["span_local", "unrotated"])
def test_soft_cap(encoding: str) -> None:
    table = Drawn(((10,) * 4, (1, 11, 12, 3), (2, 10, 11)), (0, 1, 0)).table(SpanOptions())
    layer = draw_layer(table, 11, (HEAD_SIZE, True, 1.0))
    runs = [run for run in split_runs(table, 0, 11) if run.kind is SegmentKind.DEPENDENT]
    got = attend(layer, table, runs, encoding=encoding, soft_cap=0.7)
    want = by_definition(layer, table, soft_cap=0.7)
    torch.testing.assert_close(got[8:].double(), want[8:], rtol=0, atol=2e-5)
    assert (want[8:] - by_definition(layer, table)[8:]).abs().max() > 1e-3


def test_ordinary_prompt_without_rotated_keys() -> None:
    layer = draw_layer(None, 13, (HEAD_SIZE, True, 1.2))
    got = attend(layer, None, split_runs(None, 0, 13), encoding="unrotated")
    torch.testing.assert_close(got.double(), by_definition(layer, None), rtol=0, atol=2e-5)


def _tokens(run: Run) -> range:
    return range(run.start, run.end)


def sums_in_one_order(dtype: torch.dtype) -> bool:
    """Whether a row of this machine's products is summed in the same order where it has more terms,
    all of them 0. Intel's MKL cuts float32 rows of over 384 terms in parts of other lengths."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(3, 99, 384, generator=generator).to(dtype)
    values = torch.randn(3, 512, 64, generator=generator).to(dtype)
    few = torch.bmm(weights, values[:, :384].contiguous())
    return torch.equal(few, torch.bmm(torch.nn.functional.pad(weights, (0, 128)), values))


@pytest.mark.parametrize("unrotated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_give_the_bits_of_the_whole(
    in_bf16: None, dtype: torch.dtype, unrotated: bool
) -> None:
    """At least nine of ten numbers, where the machine's own products do; with keys in no whole
    steps, seven to nine in float32."""
    config = SpanConfig(ssep=1, pdep=2, pad=3, block_size=32)

    def filled(tokens: list[int]) -> list[int]:
        return tokens + [3] * (-len(tokens) % 32)

    token_ids = [9] * 64 + filled([1] + [9] * 150) + filled([1] + [9] * 90) + [2] + [9] * 160
    table = parse_segments(token_ids, config, SpanOptions())
    assert table is not None
    num_tokens = len(token_ids)
    num_blocks = -(-num_tokens // 32)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, num_blocks, 3, 32, 64, generator=generator).to(dtype)
    query = torch.randn(num_tokens, 9, 64, generator=generator).to(dtype)
    rotary = Rotary(cos_sin_table(1e4 ** -(torch.arange(0, 64, 2) / 64), 1024), True, 1.0)
    layout = BlockLayout(32, 64, None, None, keys_are_rows=True)
    block_table = torch.arange(num_blocks, dtype=torch.int32)[None]

    def attention(start: int, end: int) -> torch.Tensor:
        outs = []
        for run in split_runs(table, start, end):
            placed = PlacedRun(0, run.start, run)
            gathered = gather_run(placed, block_table, 32, unrotated=unrotated)
            rows = query[run.start : run.end]
            outs.append(gathered_attention(rows, keys, values, gathered, layout, rotary, 0.125))
        return torch.cat(outs)

    first = 0 if unrotated else table.segments[-1].start
    whole = attention(first, num_tokens)
    same_bits = sums_in_one_order(torch.float32 if unrotated else dtype)
    for chunk in (33, 57, 100):
        cuts = [*range(first, num_tokens, chunk), num_tokens]
        chunked = torch.cat([attention(lo, hi) for lo, hi in pairwise(cuts)])
        assert float((chunked == whole).float().mean()) > (0.9 if same_bits else 0)
        assert float((chunked - whole).abs().max()) <= (1e-6 if whole.itemsize == 4 else 0.02)
