"""The rule, and a batch of everything through it."""

from __future__ import annotations

import pytest
import torch
from cases import Batch, Heads, Request, make_table
from paged import max_error

from minipic_backend.attention import dispatch
from minipic_backend.attention.compact import num_seen
from minipic_backend.attention.dispatch import (
    graph_work,
    plan_dependent,
    prefers_compact,
    refresh_graph_work,
    run_dependent,
    suits_graph,
)
from minipic_backend.attention.geometry import (
    AttentionShape,
    choose_geometry,
    choose_num_workers,
)
from minipic_backend.attention.naive import naive_varlen_attention
from minipic_backend.attention.rows import PlacedRun, split_runs
from minipic_backend.spans.segments import SegmentKind

LLAMA_8B = AttentionShape(num_heads=32, num_kv_heads=8, head_size=128, block_size=16)


def shape_of(batch, **changes):
    heads = batch.heads
    return AttentionShape(
        heads.num_heads, heads.num_kv_heads, heads.head_size, batch.block_size, itemsize=4,
        unrotated=batch.encoding == "unrotated", **changes,
    )  # fmt: skip


def test_geometry_of_a_llama():
    assert [choose_geometry(LLAMA_8B, n).block_m for n in (1, 4, 5, 16, 17, 50, 2048)] == [
        16, 16, 32, 64, 128, 128, 128,
    ]  # fmt: skip
    assert choose_num_workers(LLAMA_8B, choose_geometry(LLAMA_8B, 1), num_sms=132) == 33


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 7, 16, 20, 71])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_tile_holds_a_query_of_every_head(head_size, group, itemsize):
    shape = AttentionShape(group, 1, head_size, 16, itemsize)
    for n in (1, 3, 100):
        assert choose_geometry(shape, n).block_m >= group


@pytest.mark.parametrize(
    ("num_queries", "num_documents", "document", "is_compact"),
    [(50, 100, 1000, True), (2048, 10, 1000, True), (5, 10, 1000, False), (1, 100, 1000, False)],
)
def test_the_rule(num_queries, num_documents, document, is_compact):
    table = make_table(16, [document] * num_documents, num_queries, 16)
    (run,) = split_runs(table, table.last.start, table.num_prompt_tokens)
    assert prefers_compact(LLAMA_8B, [PlacedRun(0, 0, run)]) is is_compact


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("encoding", ["span_local", "unrotated"])
def test_a_batch_of_everything(device, encoding, compact, monkeypatch):
    monkeypatch.setattr(dispatch, "prefers_compact", lambda *_: True)
    monkeypatch.setattr(dispatch, "MIN_SHARE", 16)
    table = make_table(20, [18, 3], 21, 16)
    end = table.num_prompt_tokens
    requests = [Request(table, end + 2, end + 3), Request(table, 70, end), Request(None, 8, 9)]
    batch = Batch(requests, Heads(), encoding, device=device)
    runs = [PlacedRun(i, batch.query_start(i, run.start), run) for i, run in batch.runs()]
    if encoding == "span_local":
        runs = [p for p in runs if p.run.kind is not SegmentKind.SPAN]
    work = plan_dependent(runs, batch.block_table(), shape_of(batch), max_keys=10**6 * compact)
    assert bool(work.compact) == (compact and encoding == "span_local")
    run_dependent(
        work, batch.query, batch.key_cache, batch.value_cache, batch.rotary, batch.out, scale=0.25,
        attend=naive_varlen_attention,
    )  # fmt: skip
    mine = torch.cat([torch.arange(p.query, p.query + p.run.num_tokens) for p in runs])
    mine = mine[~batch.is_pad()[mine]]
    assert max_error(batch.out[mine], batch.expected(0.25)[mine]) < 1e-5


@pytest.mark.parametrize("encoding", ["span_local", "unrotated"])
def test_buffers_of_a_graph_serve_one_batch_after_another(device, encoding):
    """Also what a graph replays: the addresses of the first batch with the plan of the second."""
    table = make_table(16, [18, 3], 5, 16)
    end = table.num_prompt_tokens
    heads = Heads()
    work = graph_work(
        AttentionShape(
            heads.num_heads, heads.num_kv_heads, heads.head_size, 16, itemsize=4,
            unrotated=encoding == "unrotated",
        ),
        4,
        torch.device(device),
    )  # fmt: skip
    addresses = set()
    for step, requests in enumerate(
        (
            [Request(table, end, end + 1), Request(None, 3, 4), Request(table, end + 7, end + 8)],
            [Request(None, 40, 41), Request(table, end + 2, end + 3), Request(None, 0, 1)],
        )
    ):
        batch = Batch(requests, heads, encoding, device=device, seed=step)
        current = refresh_graph_work(work, *batch.rows())
        (part,) = current.paged
        addresses.add((part.plan.items.data_ptr(), part.plan.pieces.data_ptr()))
        run_dependent(
            current, batch.query, batch.key_cache, batch.value_cache, batch.rotary, batch.out,
            scale=0.25,
        )  # fmt: skip
        assert max_error(batch.out, batch.expected(0.25)) < 1e-5
    assert len(addresses) == 1


@pytest.mark.parametrize("size", [16, 48])
@pytest.mark.parametrize("encoding", ["span_local", "unrotated"])
def test_buffers_of_a_question_graph_serve_rows_of_any_length(device, encoding, size):
    """Fewer rows than there is room for, and fewer tokens than the graph has."""
    table = make_table(16, [18, 3], 9, 16)
    end = table.num_prompt_tokens
    heads = Heads()
    shape = AttentionShape(
        heads.num_heads, heads.num_kv_heads, heads.head_size, 16, itemsize=4,
        unrotated=encoding == "unrotated",
    )  # fmt: skip
    work = graph_work(shape, size, torch.device(device), max_query_len=size)
    addresses = set()
    for step, requests in enumerate(
        (
            [Request(table, end - 9, end)],
            [Request(table, end, end + 1), Request(None, 3, 4), Request(table, end - 5, end)],
            [Request(table, end - 9, end - 2), Request(table, end + 7, end + 8)],
        )
    ):
        batch = Batch(requests, heads, encoding, device=device, seed=step)
        batch.out.fill_(torch.nan)
        current = refresh_graph_work(work, *batch.rows())
        (part,) = current.paged
        addresses.add((part.plan.items.data_ptr(), part.plan.pieces.data_ptr()))
        run_dependent(
            current, batch.query, batch.key_cache, batch.value_cache, batch.rotary, batch.out,
            scale=0.25,
        )  # fmt: skip
        mine = ~batch.is_pad()
        assert max_error(batch.out[mine], batch.expected(0.25)[mine]) < 1e-5
    assert len(addresses) == 1


@pytest.mark.parametrize(
    ("counts", "starts", "suits"),
    [
        ([50], [10_064], True),
        ([50], [30_064], True),
        ([50], [100_064], False),  # reading the keys takes longer than the launches
        ([256], [2_000], True),
        ([257], [2_000], False),
        ([50, 50, 50, 50], [1_200] * 4, True),
        ([200], [30_000], False),  # too many tiles of queries over them
        ([50, *[1] * 60], [3_000, *[500] * 60], True),
        ([50, *[1] * 60], [3_000, *[5_000] * 60], False),
    ],
)
def test_which_steps_are_one_graph(counts, starts, suits):
    assert suits_graph(LLAMA_8B, counts, starts) is suits


def test_a_plan_for_a_varlen_attention_needs_one(device):
    table = make_table(20, [18], 21, 16)
    batch = Batch([Request(table, 64, 85)], Heads(), "span_local", device=device)
    runs = [PlacedRun(0, 0, batch.runs()[0][1])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "prefers_compact", lambda *_: True)
        work = plan_dependent(runs, batch.block_table(), shape_of(batch), max_keys=10**6)
    with pytest.raises(ValueError, match="varlen"):
        run_dependent(
            work, batch.query, batch.key_cache, batch.value_cache, batch.rotary, batch.out,
            scale=0.25,
        )  # fmt: skip


@pytest.mark.parametrize("change", [{"window": 9}, {"unrotated": True}])
def test_windows_and_unrotated_keys_stay_with_the_paged_kernel(device, change, monkeypatch):
    monkeypatch.setattr(dispatch, "prefers_compact", lambda *_: True)
    table = make_table(20, [18], 21, 16)
    batch = Batch([Request(table, 64, 85)], Heads(), "span_local", device=device)
    runs = [PlacedRun(0, 0, batch.runs()[0][1])]
    shape = AttentionShape(2, 1, 32, 16, **change)
    assert plan_dependent(runs, batch.block_table(), shape, max_keys=10**6).compact == ()


def test_a_request_too_long_for_the_buffer_stays_with_the_paged_kernel(device, monkeypatch):
    monkeypatch.setattr(dispatch, "prefers_compact", lambda *_: True)
    table = make_table(20, [18, 3], 21, 16)
    end = table.num_prompt_tokens
    requests = [Request(table, 80, end), Request(table, end - 4, end - 1), Request(None, 3, 40)]
    batch = Batch(requests, Heads(), "span_local", device=device)
    runs = [PlacedRun(i, batch.query_start(i, run.start), run) for i, run in batch.runs()]
    room = max(num_seen(p.run) for p in runs) - 1
    work = plan_dependent(runs, batch.block_table(), shape_of(batch), max_keys=room)
    assert work.compact
    assert work.paged
    run_dependent(
        work, batch.query, batch.key_cache, batch.value_cache, batch.rotary, batch.out, scale=0.25,
        attend=naive_varlen_attention,
    )  # fmt: skip
    mine = ~batch.is_pad()
    assert max_error(batch.out[mine], batch.expected(0.25)[mine]) < 1e-5


def test_copies_take_half_of_what_is_left():
    per_token = 2 * 8 * 128 * 2
    assert dispatch.max_compact_keys(LLAMA_8B) == (512 << 20) // per_token
    assert dispatch.max_compact_keys(LLAMA_8B, 10 << 30) == (512 << 20) // per_token
    assert dispatch.max_compact_keys(LLAMA_8B, 200 << 20) == (100 << 20) // per_token
    assert dispatch.max_compact_keys(LLAMA_8B, per_token) == 0
