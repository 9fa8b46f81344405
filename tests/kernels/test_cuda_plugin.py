"""The CUDA plugin's bookkeeping: what reaches FlashAttention, the kernels, and the graphs.

vLLM's own FlashAttention is not called here; `tests/gpu` holds the whole against the reference.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from minipic_backend.attention import dispatch
from minipic_backend.attention.geometry import AttentionShape
from minipic_backend.attention.naive import naive_varlen_attention
from minipic_backend.attention.rotary import Rotary, cos_sin_table
from minipic_backend.attention.rows import OPEN_END
from minipic_backend.config import SpanConfig, SpanOptions
from minipic_backend.errors import UnsupportedModelError
from minipic_backend.plugin import cuda_attention, cuda_graphs, cuda_state, enable, hasher
from minipic_backend.spans.segments import SegmentTable, parse_segments

SIZE = 16
CONFIG = SpanConfig(ssep=3, pdep=4, pad=5, block_size=SIZE)


def padded(ids: list[int], filler: int) -> list[int]:
    return ids + [filler] * (-len(ids) % SIZE)


PROMPT = [
    *padded(list(range(10, 40)), 9),  # prefix: 32 tokens
    *padded([3, *range(50, 70)], 5),  # span: 21 tokens, 11 pads
    *padded([3, *range(70, 75)], 5),  # span: 6 tokens, 10 pads
    *[4, *range(80, 90)],  # question: 11 tokens
]


def table(**options: Any) -> SegmentTable:
    found = parse_segments(PROMPT, CONFIG, SpanOptions(**options))
    assert found is not None
    return found


@pytest.fixture
def state() -> cuda_state.SpanModelState:
    new = object.__new__(cuda_state.SpanModelState)
    new.span_config = CONFIG
    new.span_tables = {"spans": table()}
    new.row_shifts = torch.zeros(8, dtype=torch.int64)
    new.row_shifts_key = None
    return new


def input_batch(req_ids: list[str], starts: list[int], counts: list[int]) -> SimpleNamespace:
    positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
    return SimpleNamespace(
        req_ids=req_ids,
        num_reqs=len(req_ids),
        num_reqs_after_padding=len(req_ids),
        num_computed_tokens_np=np.array(starts),
        num_scheduled_tokens=np.array(counts),
        query_start_loc_np=np.concatenate([[0], np.cumsum(counts)]),
        positions=torch.from_numpy(positions),
    )


def test_mixed_batch_gets_cached_positions(state: cuda_state.SpanModelState) -> None:
    batch = input_batch(["plain", "spans"], [7, 0], [3, len(PROMPT)])
    spans = state._span_batch(batch, is_full=False)
    wanted = np.concatenate([[7, 8, 9], table().cached_positions(0, len(PROMPT))])
    assert batch.positions.tolist() == wanted.tolist()
    assert [len(runs) for runs in spans.runs] == [1, 4]
    assert spans.key is None


def test_decode_batch_shifts_positions_and_is_recognized(state: cuda_state.SpanModelState) -> None:
    at = len(PROMPT) + 4
    first = input_batch(["spans", "plain"], [at, 20], [1, 1])
    spans = state._span_batch(first, is_full=True)
    assert first.positions.tolist() == [int(table().cached_positions(at, at + 1)[0]), 20]
    later = input_batch(["spans", "plain"], [at + 1, 21], [1, 1])
    assert state._span_batch(later, is_full=True).key == spans.key
    assert later.positions.tolist() == [first.positions[0] + 1, 21]
    other = input_batch(["plain", "spans"], [22, at + 2], [1, 1])
    assert state._span_batch(other, is_full=True).key != spans.key
    assert other.positions.tolist() == [22, first.positions[0] + 2]


def test_a_single_token_of_a_span_is_never_taken_for_a_steady_decode(
    state: cuda_state.SpanModelState,
) -> None:
    batch = input_batch(["spans"], [40], [1])
    assert state._span_batch(batch, is_full=True).key is None
    assert batch.positions.tolist() == table().cached_positions(40, 41).tolist()


def test_tokens_generated_behind_a_lone_span_are_no_steady_decode_of_its_own_last_token(
    state: cuda_state.SpanModelState,
) -> None:
    prompt = [3, *range(50, 82)]
    lone = parse_segments(prompt, CONFIG, SpanOptions())
    assert lone is not None
    state.span_tables = {"lone": lone}
    last = state._span_batch(input_batch(["lone"], [len(prompt) - 1], [1]), is_full=True)
    later = state._span_batch(input_batch(["lone"], [len(prompt)], [1]), is_full=True)
    assert last.key is None
    assert later.key is not None
    assert [seen.start for seen in later.runs[0][0].seen] == [0, len(prompt)]


def builder(monkeypatch: pytest.MonkeyPatch, device: str) -> Any:
    """A builder whose parent notes the batch that it is given."""
    new = object.__new__(cuda_attention.SpanFlashMetadataBuilder)
    new.device = torch.device(device)
    new.block_size = SIZE
    new.is_unrotated = False
    new.max_copied_keys = 10**6
    new.captures = None
    new.max_sequences = 4
    new.shape = AttentionShape(4, 2, 32, SIZE, itemsize=4)

    new.fast = []

    def build(self: Any, prefix: int, common: Any, fast_build: bool = False) -> Any:
        self.fast.append(fast_build)
        return cuda_attention.FlashAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )

    monkeypatch.setattr(cuda_attention.FlashAttentionMetadataBuilder, "build", build)
    return new


def common(starts: list[int], counts: list[int], device: str, num_blocks: int = 8) -> Any:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    loc = torch.tensor(np.concatenate([[0], np.cumsum(counts)]), dtype=torch.int32)
    lens = torch.tensor([s + c for s, c in zip(starts, counts, strict=True)], dtype=torch.int32)
    table = torch.arange(len(starts) * num_blocks, dtype=torch.int32).view(len(starts), num_blocks)
    return CommonAttentionMetadata(
        query_start_loc=loc.to(device),
        query_start_loc_cpu=loc,
        seq_lens=lens.to(device),
        num_reqs=len(starts),
        num_actual_tokens=int(loc[-1]),
        max_query_len=max(counts),
        max_seq_len=int(lens.max()),
        block_table_tensor=(table + 100).to(device),
        slot_mapping=torch.zeros(int(loc[-1]), dtype=torch.int64, device=device),
    )


def test_context_runs_become_sequences_and_the_rest_is_planned(
    state: cuda_state.SpanModelState, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    starts, counts = [7, 0], [3, len(PROMPT)]
    spans = state._span_batch(input_batch(["plain", "spans"], starts, counts), is_full=False)
    metadata = builder(monkeypatch, device).build(0, common(starts, counts, device), spans=spans)
    # plain, prefix, two spans behind the prefix, and for the question one that sees itself alone
    assert metadata.query_start_loc.tolist() == [0, 3, 35, 67, 83, 94]
    assert metadata.seq_lens.tolist() == [10, 32, 64, 48, 11]
    first = 108  # of the second request
    assert metadata.block_table[1, :2].tolist() == [first, first + 1]
    assert metadata.block_table[2, :4].tolist() == [first + i for i in (0, 1, 2, 3)]
    assert metadata.block_table[3, :3].tolist() == [first + i for i in (0, 1, 4)]
    assert metadata.block_table[4, 0] == first + 5
    assert metadata.context_queries is None
    (part,) = metadata.work.paged
    assert part.rows.query_start.tolist() == [83]
    assert part.rows.query_end.tolist() == [94]
    assert part.segments.start[:4].tolist() == [0, 32, 64, 80]
    assert part.segments.end[:4].tolist() == [32, 53, 70, OPEN_END]
    assert part.segments.shift[:4].tolist() == [0, 0, 21, 0]


def test_few_context_runs_are_taken_out_of_the_batch(
    state: cuda_state.SpanModelState, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Among many other queries, which would be attended to for nothing."""
    starts, counts = [0, 64], [3, len(PROMPT) - 64]
    spans = state._span_batch(input_batch(["plain", "spans"], starts, counts), is_full=False)
    metadata = builder(monkeypatch, device).build(0, common(starts, counts, device), spans=spans)
    assert metadata.query_start_loc.tolist() == [0, 3, 19]
    assert metadata.context_queries.tolist() == list(range(19))
    (part,) = metadata.work.paged
    assert part.rows.query_start.tolist() == [19]


def test_a_token_generated_inside_of_a_block_stands_in_with_that_block(
    state: cuda_state.SpanModelState, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Behind a lone span, which need not end where a block does."""
    prompt = [3, *range(50, 82)]
    lone = parse_segments(prompt, CONFIG, SpanOptions())
    assert lone is not None
    state.span_tables = {"lone": lone}
    starts, counts = [len(prompt) + 2, 7], [1, 3]
    spans = state._span_batch(input_batch(["lone", "plain"], starts, counts), is_full=False)
    metadata = builder(monkeypatch, device).build(0, common(starts, counts, device), spans=spans)
    assert metadata.query_start_loc.tolist() == [0, 1, 4]
    assert metadata.seq_lens.tolist() == [4, 10]  # tokens 32 to 35 of the first
    assert metadata.block_table[:, 0].tolist() == [102, 108]


@pytest.mark.parametrize(("max_sequences", "is_fast"), [(5, False), (4, True)])
def test_more_sequences_than_requests_get_no_schedule_made_ahead(
    state: cuda_state.SpanModelState,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    max_sequences: int,
    is_fast: bool,
) -> None:
    """vLLM's buffer for one has room for `max_num_seqs` sequences."""
    starts, counts = [7, 0], [3, len(PROMPT)]
    spans = state._span_batch(input_batch(["plain", "spans"], starts, counts), is_full=False)
    new = builder(monkeypatch, device)
    new.max_sequences = max_sequences
    new.build(0, common(starts, counts, device), spans=spans)
    assert new.fast == [is_fast]


def test_a_batch_without_spans_keeps_the_metadata_of_vllm(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    metadata = builder(monkeypatch, device).build(0, common([5], [3], device))
    assert type(metadata) is cuda_attention.FlashAttentionMetadata


def test_graph_rows_are_rewritten_only_when_the_batch_changes(
    state: cuda_state.SpanModelState, device: str
) -> None:
    shape = AttentionShape(4, 2, 32, SIZE, itemsize=4)
    rows = cuda_graphs.GraphRows(4, 64, torch.device(device), shape)
    at = len(PROMPT)
    filled: list[int] = []
    fill = rows._fill
    rows._fill = lambda seen, n: (filled.append(n), fill(seen, n))  # type: ignore[method-assign]
    address = None
    for step in range(3):
        batch = input_batch(["spans", "plain"], [at + step, 20 + step], [1, 1])
        spans = state._span_batch(batch, is_full=True)
        work = rows.work("decode", common([at + step, 20 + step], [1, 1], device), spans)
        (part,) = work.paged
        assert part.segments.first.tolist() == [0, 4]
        assert part.segments.last.tolist() == [4, 5]
        assert part.segments.shift[:5].tolist() == [0, 0, 21, 0, 0]
        assert address in (None, part.segments.start.data_ptr())
        address = part.segments.start.data_ptr()
    assert filled == [2]
    question = state._span_batch(input_batch(["spans"], [80], [11]), is_full=True)
    rows.work("question", common([80], [11], device), question)
    batch = input_batch(["spans", "plain"], [at + 3, 23], [1, 1])
    again = state._span_batch(batch, is_full=True)
    assert again.key == spans.key
    (part,) = rows.work("decode", common([at + 3, 23], [1, 1], device), again).paged
    assert part.segments.last.tolist() == [4, 5]
    assert part.segments.shift[:5].tolist() == [0, 0, 21, 0, 0]
    assert filled == [2, 1, 2]


@pytest.mark.parametrize(
    ("names", "starts", "counts"),
    [
        (["spans"], [80], [11]),
        (["spans"], [84], [5]),
        (["plain", "spans"], [20, 80], [1, 11]),
        (["spans", "plain"], [86, 50], [5, 1]),
        (["chat"], [80], [16 + 7]),  # two dependent segments, and so two rows
        (["chat", "spans", "plain"], [85, 80, 9], [16 + 2, 4, 1]),
    ],
)
@pytest.mark.parametrize("key_encoding", ["span_local", "unrotated"])
def test_a_question_graph_gives_what_separate_kernels_give(
    state: cuda_state.SpanModelState,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    names: list[str],
    starts: list[int],
    counts: list[int],
    key_encoding: str,
) -> None:
    """One batch after another in the buffers of one graph, padded to its size."""
    monkeypatch.setattr(dispatch, "prefers_compact", lambda *_: False)
    torch.manual_seed(0)
    chat = [*padded(PROMPT, 5), 4, *range(90, 100)]
    state.span_tables["chat"] = parse_segments(chat, CONFIG, SpanOptions())  # type: ignore[assignment]
    is_unrotated = key_encoding == "unrotated"
    shape = AttentionShape(4, 2, 32, SIZE, itemsize=4, unrotated=is_unrotated)
    rows = cuda_graphs.GraphRows(4, 64, torch.device(device), shape)
    cache = torch.randn(32, 2, SIZE, 64, device=device)
    impl = impl_for(monkeypatch, "auto", device)
    layer = SimpleNamespace(**dict.fromkeys(FP8_SCALES, 1.0))

    def attention(query: torch.Tensor, batch: Any, spans: Any) -> torch.Tensor:
        new = builder(monkeypatch, device)
        new.shape, new.is_unrotated, new.graph_rows = shape, is_unrotated, rows
        metadata = new.build(0, batch, spans=spans)
        out = torch.full_like(query, torch.nan)
        impl.forward(layer, query, None, None, cache, metadata, out)
        return out

    def forward(
        self: Any, layer: Any, q: Any, k: Any, v: Any, kv: Any, data: Any, out: Any
    ) -> None:
        key_cache, value_cache = self._split(kv)
        naive_varlen_attention(
            q=q, k=key_cache, v=value_cache, cu_seqlens_q=data.query_start_loc,
            max_seqlen_q=data.max_query_len, seqused_k=data.seq_lens,
            max_seqlen_k=data.max_seq_len, block_table=data.block_table,
            softmax_scale=self.scale, causal=True, softcap=0.0, out=out,
        )  # fmt: skip

    monkeypatch.setattr(cuda_attention.FlashAttentionImpl, "forward", forward)
    num_tokens, size = sum(counts), 48
    for shift in (0, 1):  # the second batch finds what the first has left
        starts = [start + shift for start in starts]
        batch = common(starts, counts, device)
        batch = batch.replace(block_table_tensor=batch.block_table_tensor - 100)
        query = torch.randn(size, 4, 32, device=device)
        apart = state._span_batch(input_batch(names, starts, counts), is_full=False)
        assert apart.graph is None
        wanted = attention(query[:num_tokens], batch, apart)
        spans = state._span_batch(input_batch(names, starts, counts), is_full=True)
        assert spans.graph == "question"
        pads = 4 - len(names)
        loc = torch.nn.functional.pad(batch.query_start_loc, (0, pads), value=num_tokens)
        full = batch.replace(
            num_actual_tokens=size,
            num_reqs=4,
            query_start_loc=loc,
            seq_lens=torch.nn.functional.pad(batch.seq_lens, (0, pads)),
            block_table_tensor=torch.nn.functional.pad(batch.block_table_tensor, (0, 0, 0, pads)),
        )
        got = attention(query, full, spans)
        assert got[num_tokens:].isnan().all()  # nobody's rows are left alone
        assert (got[:num_tokens] - wanted).abs().max() < 1e-5


def test_a_dummy_batch_of_a_question_graph_is_planned(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """What is captured: as many tokens as the graph has, in fewer requests than rows."""
    new = builder(monkeypatch, device)
    new.graph_rows = cuda_graphs.GraphRows(4, 64, torch.device(device), new.shape)
    new.captures = "question"
    metadata = new.build(0, common([0, 0], [8, 8], device))
    (part,) = metadata.work.paged
    assert part.plan.items[:16, 2].tolist() == [1] * 16
    assert part.rows.block_table.data_ptr() == new.graph_rows._block_table.data_ptr()
    new.captures = None
    assert not hasattr(new.build(0, common([0], [3], device)), "work")


@pytest.mark.parametrize(
    ("names", "starts", "counts", "local", "unrotated"),
    [
        (["spans"], [80], [11], True, True),
        (["spans"], [79], [12], False, True),  # the last pad of a span
        (["plain", "spans"], [20, 80], [1, 11], True, True),
        (["plain", "spans"], [20, 80], [2, 11], False, True),  # a chunk of an ordinary prompt
        (["spans", "plain"], [91, 50], [1, 1], False, False),  # decodes have graphs of their own
        (["spans"], [80], [300], False, False),
    ],
)
def test_question_graphs_are_for_questions(
    state: cuda_state.SpanModelState,
    names: list[str],
    starts: list[int],
    counts: list[int],
    local: bool,
    unrotated: bool,
) -> None:
    shape = AttentionShape(4, 2, 32, SIZE)
    for encoding, wanted in (("span_local", local), ("unrotated", unrotated)):
        state.span_config = replace(CONFIG, key_encoding=encoding)  # type: ignore[arg-type]
        assert state.suits_question_graph(names, starts, counts, shape, 64) is wanted
    assert not state.suits_question_graph(["spans"], [80], [11], shape, 7)


@pytest.mark.parametrize("key_encoding", ["span_local", "unrotated"])
def test_no_question_has_more_ranges_than_a_graph_was_said_to_need(
    state: cuda_state.SpanModelState, key_encoding: str
) -> None:
    """Whatever part of a prompt a step holds."""
    state.span_config = replace(CONFIG, key_encoding=key_encoding)  # type: ignore[arg-type]
    shape = AttentionShape(4, 2, 32, SIZE)
    chat = [*padded(PROMPT, 5), 4, *range(90, 100)]
    state.span_tables["chat"] = parse_segments(chat, CONFIG, SpanOptions())  # type: ignore[assignment]
    for start in range(0, len(chat), 3):
        for count in (2, 17, 40, 90):
            batch = state._span_batch(input_batch(["chat"], [start], [count]), is_full=True)
            needed = sum(len(run.seen) for runs in batch.runs for run in runs)
            asked = (["chat"], [start], [count], shape)
            assert not state.suits_question_graph(*asked, needed - 1)


FP8_SCALES = {"_q_scale_float": 0.5, "_k_scale_float": 0.25, "_v_scale_float": 2.0}


def impl_for(monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str, device: str) -> Any:
    """An implementation whose parent notes the queries that it is given, and writes zeros."""
    new = object.__new__(cuda_attention.SpanFlashImpl)
    new.head_size, new.scale, new.logits_soft_cap = 32, 0.25, 0.0
    new.kv_cache_dtype = kv_cache_dtype
    inv_freq = 1.0 / 100.0 ** (torch.arange(0, 32, 2) / 32)
    new.rotary = Rotary(cos_sin_table(inv_freq, 256).to(device), is_neox=True)
    new.stock = []
    new._attend = naive_varlen_attention

    def forward(self: Any, layer: Any, query: Any, *args: Any) -> None:
        self.stock.append(query)
        args[-1].zero_()

    monkeypatch.setattr(cuda_attention.FlashAttentionImpl, "forward", forward)
    return new


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_fp8_is_read_with_its_scales_and_never_through_copies(
    state: cuda_state.SpanModelState,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    num_kv_heads: int,
    in_place: bool,
) -> None:
    """Queries and cache in fp8 against the same values, scales multiplied in, in bfloat16."""
    monkeypatch.setattr(dispatch, "prefers_compact", lambda *_: True)
    monkeypatch.setattr(cuda_attention, "_STAND_IN_RATIO", 2 if in_place else 100)
    torch.manual_seed(0)
    starts, counts = [7, 0], [3, len(PROMPT)]
    spans = state._span_batch(input_batch(["plain", "spans"], starts, counts), is_full=False)
    new = builder(monkeypatch, device)
    new.max_copied_keys = 0  # as `__init__` sets it for fp8
    new.shape = AttentionShape(4, num_kv_heads, 32, SIZE)
    batch = common(starts, counts, device)
    batch = batch.replace(block_table_tensor=batch.block_table_tensor - 100)
    metadata = new.build(0, batch, spans=spans)
    assert metadata.work.compact == ()
    num_tokens = sum(counts)
    num_stock = num_tokens if in_place else num_tokens - 11
    # As vLLM allocates it: bytes, [num_blocks, num_kv_heads, block_size, 2 * head_size].
    cache = torch.randn(16, num_kv_heads, SIZE, 64).to(torch.float8_e4m3fn).to(device)
    query = torch.randn(num_tokens, 4, 32).to(torch.float8_e4m3fn).to(device)
    outs = []
    for is_fp8 in (True, False):
        impl = impl_for(monkeypatch, "fp8" if is_fp8 else "auto", device)
        scales = FP8_SCALES if is_fp8 else dict.fromkeys(FP8_SCALES, 1.0)
        q, kv = query, cache.view(torch.uint8)
        if not is_fp8:
            factors = torch.tensor([0.25, 2.0], device=device).repeat_interleave(32)
            q = (query.float() * 0.5).bfloat16()
            kv = (cache.float() * factors).bfloat16()
        out = torch.full((num_tokens, 4, 32), torch.nan, dtype=torch.bfloat16, device=device)
        impl.forward(SimpleNamespace(**scales), q, None, None, kv, metadata, out)
        (stock,) = impl.stock
        assert stock.dtype is q.dtype
        assert torch.equal(stock.float(), q[:num_stock].float())
        outs.append(out.float())
    fp8, widened = outs
    assert widened[-11:].abs().max() > 0.1
    assert (fp8 - widened).norm() < 2.0**-8 * widened.norm()


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize(
    ("starts", "counts"),
    [
        ([7, 0], [3, len(PROMPT)]),
        ([0, 36], [40, len(PROMPT) - 36]),  # from inside of a span on
        ([5, 84], [40, 5]),  # from inside of the question on
        ([len(PROMPT) + 3, 0], [1, 30]),  # decode beside a chunk of a prefix
    ],
)
def test_the_batch_as_it_lies_gives_what_its_context_runs_alone_give(
    state: cuda_state.SpanModelState,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    starts: list[int],
    counts: list[int],
    compact: bool,
) -> None:
    """Whatever FlashAttention writes for stand-ins, no query keeps it."""
    monkeypatch.setattr(dispatch, "prefers_compact", lambda *_: compact)
    torch.manual_seed(0)
    names = ["spans", "plain"] if counts[0] == 1 else ["plain", "spans"]
    cache = torch.randn(16, 2, SIZE, 64, device=device)
    query = torch.randn(sum(counts), 4, 32, device=device)
    impl = impl_for(monkeypatch, "auto", device)

    def forward(
        self: Any, layer: Any, q: Any, k: Any, v: Any, kv: Any, data: Any, out: Any
    ) -> None:
        key_cache, value_cache = self._split(kv)
        naive_varlen_attention(
            q=q[: data.num_actual_tokens],
            k=key_cache,
            v=value_cache,
            cu_seqlens_q=data.query_start_loc,
            max_seqlen_q=data.max_query_len,
            seqused_k=data.seq_lens,
            max_seqlen_k=data.max_seq_len,
            block_table=data.block_table,
            softmax_scale=self.scale,
            causal=True,
            softcap=0.0,
            out=out,
        )

    monkeypatch.setattr(cuda_attention.FlashAttentionImpl, "forward", forward)
    outs = []
    for ratio in (0, 10**6):
        monkeypatch.setattr(cuda_attention, "_STAND_IN_RATIO", ratio)
        spans = state._span_batch(input_batch(names, starts, counts), is_full=False)
        batch = common(starts, counts, device)
        batch = batch.replace(block_table_tensor=batch.block_table_tensor - 100)
        metadata = builder(monkeypatch, device).build(0, batch, spans=spans)
        assert (metadata.context_queries is None) is (ratio == 0)
        out = torch.full((sum(counts), 4, 32), torch.nan, device=device)
        layer = SimpleNamespace(**dict.fromkeys(FP8_SCALES, 1.0))
        impl.forward(layer, query, None, None, cache, metadata, out)
        assert out.isfinite().all()
        outs.append(out)
    assert torch.equal(*outs)


def test_one_kv_head_gets_strides_that_flash_attention_can_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is left of few KV heads under tensor parallelism."""
    impl = impl_for(monkeypatch, "auto", "cpu")
    cache = torch.zeros(8, 1, SIZE, 64).as_strided((8, 1, SIZE, 64), (SIZE * 64, 1, 64, 1))
    for part in impl._split(cache):
        assert part.shape == (8, SIZE, 1, 32)
        assert all(stride * part.itemsize % 16 == 0 for stride in part.stride()[:-1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"kv_cache_dtype": "auto"}, None),
        ({"kv_cache_dtype": "fp8_e5m2"}, "a fp8_e5m2 KV cache"),
        ({"kv_cache_dtype": "nvfp4"}, "a nvfp4 KV cache"),
        ({"_k_scale": torch.ones(2)}, "scales by head"),
    ],
)
def test_caches_that_a_checkpoint_asks_for(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str | None
) -> None:
    one = torch.tensor(1.0)
    layer = SimpleNamespace(
        **{"kv_cache_dtype": "fp8", "_q_scale": one, "_k_scale": one, "_v_scale": one}
        | {"layer_name": "layers.0.attn"}
        | change
    )
    monkeypatch.setattr(enable, "_platform", lambda: "cuda")
    if words is None:
        enable.check_layer_cache(layer, "model")
    else:
        with pytest.raises(UnsupportedModelError, match=words):
            enable.check_layer_cache(layer, "model")
    monkeypatch.setattr(enable, "_platform", lambda: "cpu")
    if layer.kv_cache_dtype == "auto":
        enable.check_layer_cache(layer, "model")
    else:  # a CPU reads none of them
        with pytest.raises(UnsupportedModelError, match=f"{layer.kv_cache_dtype} KV cache"):
            enable.check_layer_cache(layer, "model")


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_the_heads_of_two_ranks_are_the_heads_of_one(
    state: cuda_state.SpanModelState,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    num_kv_heads: int,
) -> None:
    """Tensor parallelism: a rank has its own query heads and KV heads, a lone one is on both."""
    torch.manual_seed(0)
    starts, counts = [7, 0], [3, len(PROMPT)]
    spans = state._span_batch(input_batch(["plain", "spans"], starts, counts), is_full=False)
    batch = common(starts, counts, device)
    batch = batch.replace(block_table_tensor=batch.block_table_tensor - 100)
    cache = torch.randn(16, num_kv_heads, SIZE, 64, device=device)
    query = torch.randn(sum(counts), 4, 32, device=device)
    scales = SimpleNamespace(**dict.fromkeys(FP8_SCALES, 1.0))

    def attention(query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        new = builder(monkeypatch, device)
        new.shape = AttentionShape(query.shape[1], cache.shape[1], 32, SIZE, itemsize=4)
        metadata = new.build(0, batch, spans=spans)
        out = torch.full_like(query, torch.nan)
        impl = impl_for(monkeypatch, "auto", device)
        impl.forward(scales, query, None, None, cache, metadata, out)
        return out

    whole = attention(query, cache)
    ranks = [
        attention(
            query[:, 2 * rank : 2 * rank + 2].contiguous(),
            cache if num_kv_heads == 1 else cache[:, rank : rank + 1].contiguous(),
        )
        for rank in (0, 1)
    ]
    assert whole[-11:].abs().max() > 0.1
    assert (torch.cat(ranks, dim=1) - whole).abs().max() < 1e-5


def test_a_worker_takes_the_segments_that_the_scheduler_read(
    state: cuda_state.SpanModelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own process or in the engine's, and reads what comes without them."""
    from vllm.v1.core.sched.output import NewRequestData

    read = []
    monkeypatch.setattr(
        hasher, "request_segments", lambda request, *_: read.append(request.req_id) or table()
    )
    fields = {
        "prompt_token_ids": PROMPT, "mm_features": [], "sampling_params": None,
        "pooling_params": None, "block_ids": ([0],), "num_computed_tokens": 0,
        "lora_request": None,
    }  # fmt: skip
    sent = NewRequestData(req_id="with", **fields)
    sent.minipic_table = table()
    for received in (sent, pickle.loads(pickle.dumps(sent))):
        assert cuda_state.worker_segments(received, CONFIG) == table()
    assert read == []
    assert cuda_state.worker_segments(NewRequestData(req_id="bare", **fields), CONFIG) == table()
    assert read == ["bare"]


def test_ranks_derive_equal_batches_from_what_the_scheduler_sends(
    state: cuda_state.SpanModelState,
) -> None:
    """And so choose the same graphs: another choice on another rank would never return."""
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData

    sent = NewRequestData(
        req_id="sent",
        prompt_token_ids=PROMPT,
        mm_features=[],
        sampling_params=SamplingParams(extra_args={"minipic": SpanOptions().to_dict()}),
        pooling_params=None,
        block_ids=([0],),
        num_computed_tokens=0,
        lora_request=None,
    )
    batches = []
    for _ in range(2):
        received = pickle.loads(pickle.dumps(sent))
        state.span_tables = {"sent": cuda_state.worker_segments(received, CONFIG)}
        state.row_shifts_key = None
        for is_full, start, count in ((False, 0, len(PROMPT)), (True, len(PROMPT), 1)):
            batch = state._span_batch(input_batch(["sent"], [start], [count]), is_full=is_full)
            batches.append((batch.runs, batch.key, state.num_segments(["sent"])))
    assert batches[:2] == batches[2:]
    assert batches[1][1] is not None
