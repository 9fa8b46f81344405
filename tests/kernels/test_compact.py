"""Copies of keys through a varlen attention, and spans as sequences."""

from __future__ import annotations

import pytest
import torch
from cases import Batch, Heads, Request, make_table
from paged import max_error, relative_error

from minipic_backend.attention.compact import TILE, compact_attention, num_seen, plan_compact
from minipic_backend.attention.naive import naive_varlen_attention
from minipic_backend.attention.rows import PlacedRun, SeenSegment
from minipic_backend.attention.sequences import context_sequences, joined
from minipic_backend.spans.segments import SegmentKind


def placed_runs(batch, *kinds):
    runs = [PlacedRun(i, batch.query_start(i, run.start), run) for i, run in batch.runs()]
    return [placed for placed in runs if placed.run.kind in kinds]


def run_compact(batch, scale=0.25, soft_cap=0.0, max_keys=10**6):
    runs = placed_runs(batch, SegmentKind.DEPENDENT)
    passes = plan_compact(runs, batch.block_table(), max_keys)
    compact_attention(
        batch.query, batch.key_cache, batch.value_cache, passes, batch.rotary, batch.out,
        naive_varlen_attention, scale=scale, soft_cap=soft_cap,
    )  # fmt: skip
    return passes


def check(batch, expected):
    """Dependent queries are right, but for pads; others are left alone."""
    mine = torch.zeros(len(batch.query), dtype=torch.bool)
    for placed in placed_runs(batch, SegmentKind.DEPENDENT):
        mine[placed.query : placed.query + placed.run.num_tokens] = True
    assert batch.out[~mine].isnan().all()
    mine &= ~batch.is_pad()
    assert max_error(batch.out[mine], expected[mine]) < 1e-5


@pytest.mark.parametrize("num_spans", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("frame", ["none", "prefix"])
@pytest.mark.parametrize("seen", [None, 0, 7, 16, 25])
def test_questions(device, num_spans, frame, seen):
    documents = [17, 16, 31, 1, 16, 5, 2][:num_spans]
    table = make_table(19, documents, 9, 16, frame=frame, seen_prefix=seen)
    end = table.num_prompt_tokens
    requests = [Request(table, table.last.start, end), Request(table, end + 1, end + 3)]
    batch = Batch(requests, Heads(num_heads=6, num_kv_heads=2), "span_local", device=device)
    run_compact(batch)
    check(batch, batch.expected(0.25))


@pytest.mark.parametrize("max_keys", [84, 100, 149])
def test_passes(device, max_keys):
    table = make_table(19, [16, 31], 5, 16)
    end = table.num_prompt_tokens
    requests = [Request(table, 60, end), Request(None, 3, 6), Request(table, end - 4, end)]
    batch = Batch(requests, Heads(), "span_local", device=device)
    passes = run_compact(batch, max_keys=max_keys)
    assert len(passes) > 1
    assert all(part.num_keys <= max_keys for part in passes)
    check(batch, batch.expected(0.25))


def test_a_run_that_the_buffer_cannot_hold_is_refused(device):
    table = make_table(19, [16, 31], 5, 16)
    batch = Batch([Request(table, 80, 85)], Heads(), "span_local", device=device)
    (placed,) = placed_runs(batch, SegmentKind.DEPENDENT)
    count = num_seen(placed.run)
    assert plan_compact([placed], batch.block_table(), count)[0].num_keys == count
    with pytest.raises(ValueError, match=str(count)):
        plan_compact([placed], batch.block_table(), count - 1)


@pytest.mark.parametrize("length", [TILE - 1, TILE, TILE + 1, 3 * TILE + 5])
def test_long_segments_take_several_tiles(device, length):
    table = make_table(3, [length, 2 * TILE, 1, length], length, 16, offsets="padded")
    end = table.num_prompt_tokens
    requests = [Request(table, end - 3, end), Request(table, table.last.start, end - 1)]
    batch = Batch(requests, Heads(), "span_local", device=device)
    run_compact(batch)
    check(batch, batch.expected(0.25))


@pytest.mark.parametrize(
    "heads", [Heads(head_size=80, rotary_dim=32), Heads(num_heads=40, is_neox=False)], ids=str
)
def test_heads(device, heads):
    table = make_table(0, [16, 18], 5, 16)
    batch = Batch([Request(table, 48, table.num_prompt_tokens)], heads, "span_local", device=device)
    run_compact(batch, soft_cap=2.0)
    check(batch, batch.expected(0.25, soft_cap=2.0))


def test_bfloat16(device):
    """As in test_paged, and the turned keys are rounded."""
    table = make_table(16, [40, 30, 17], 8, 16)
    batch = Batch(
        [Request(table, table.last.start, table.num_prompt_tokens)], Heads(), "span_local",
        dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    run_compact(batch)
    assert relative_error(batch.out, batch.expected(0.25)) < 2.0**-8


def test_spans_behind_their_frames(device):
    """Several spans of one chunk, one from its middle on, the prefix, an ordinary prompt."""
    table = make_table(20, [18, 33, 5], 4, 16)
    requests = [Request(table, 8, 120), Request(None, 20, 37), Request(table, 70, 100)]
    batch = Batch(requests, Heads(), "span_local", device=device)
    runs = placed_runs(batch, SegmentKind.PREFIX, SegmentKind.SPAN)
    s = context_sequences(runs, batch.block_table(), 16)
    queries = torch.cat(
        [torch.arange(p.query, p.query + p.run.num_tokens, device=device) for p in runs]
    )
    out = naive_varlen_attention(
        q=batch.query[queries], k=batch.key_cache, v=batch.value_cache,
        cu_seqlens_q=s.cu_seqlens_q, max_seqlen_q=s.max_seqlen_q, seqused_k=s.seqused_k,
        max_seqlen_k=s.max_seqlen_k, block_table=s.block_table, softmax_scale=0.25, causal=True,
        softcap=0.0, out=torch.empty_like(batch.query[queries]),
    )  # fmt: skip
    assert max_error(out, batch.expected(0.25)[queries.cpu()]) < 1e-5


def test_neighbours_that_one_query_serves_are_joined():
    segments = [
        SeenSegment(0, 32, 0, 0), SeenSegment(32, 40, 0, 0), SeenSegment(48, 48, 3, 0),
        SeenSegment(48, 64, 0, 0), SeenSegment(64, 80, 5, 0),
    ]  # fmt: skip
    assert [(s.start, s.end, s.shift) for s in joined(segments)] == [
        (0, 40, 0), (48, 64, 0), (64, 80, 5),
    ]  # fmt: skip


@pytest.mark.parametrize("offsets", ["compact", "padded"])
def test_hidden_markers(device, offsets):
    table = make_table(16, [5, 20], 5, 16, see_markers=False, offsets=offsets)
    batch = Batch([Request(table, 64, 69)], Heads(), "span_local", device=device)
    run_compact(batch)
    check(batch, batch.expected(0.25))


def test_fp8_is_refused(device):
    """Turned copies of fp8 keys would be rounded a second time."""
    table = make_table(0, [5], 5, 16)
    batch = Batch(
        [Request(table, 16, 21)], Heads(), "span_local", dtype=torch.bfloat16, device=device,
        query_dtype=torch.float8_e4m3fn, cache_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    with pytest.raises(ValueError, match="float8"):
        run_compact(batch)
