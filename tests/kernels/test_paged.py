"""Both paged kernels against the specification in float64.

float32: products and sums of some hundred terms of size 1, eps = 6e-8: 1e-5 absolute is ample.
16 bits: the turned query (and, for `unrotated`, the turned key), the softmax weights and the
output are each rounded once, a relative error of eps / sqrt(3) (eps = 2^-9 for bfloat16, 2^-12 for
float16); together less than 2 eps of the output's norm where scores are of size 1.
"""

from __future__ import annotations

import pytest
import torch
from cases import Batch, Heads, Request, make_table
from paged import max_error, relative_error, run_paged

ENCODINGS = ["span_local", "unrotated"]
FLOAT32 = 1e-5
SIXTEEN_BITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

encodings = pytest.mark.parametrize("encoding", ENCODINGS)


def decode(table, generated: int = 0) -> Request:  # type: ignore[no-untyped-def]
    """The last token of the prompt, or one behind it."""
    end = table.num_prompt_tokens + generated
    return Request(table, end - 1, end)


def question(table) -> Request:  # type: ignore[no-untyped-def]
    return Request(table, table.last.start, table.num_prompt_tokens)


@encodings
@pytest.mark.parametrize("num_spans", [0, 1, 2, 3, 5, 6])
@pytest.mark.parametrize("frame", ["none", "prefix"])
def test_decode_over_any_number_of_segments(device, encoding, num_spans, frame):
    table = make_table(19, [17, 5, 31, 1, 16, 23][:num_spans], 9, 16, frame=frame)
    batch = Batch([decode(table), decode(table, 13)], Heads(), encoding, device=device)
    assert max_error(run_paged(batch, spans=False), batch.expected(0.25)) < FLOAT32


@encodings
@pytest.mark.parametrize("num_workers", [1, 2, 7, 20])
def test_cuts_inside_segments_and_items(device, encoding, num_workers):
    table = make_table(0, [33, 18], 11, 16)
    requests = [decode(table), Request(None, 40, 41), question(table)]
    batch = Batch(requests, Heads(num_heads=2, num_kv_heads=2), encoding, device=device)
    out = run_paged(batch, num_workers=num_workers, block_n=16)
    assert max_error(out, batch.expected(0.25)) < FLOAT32


@encodings
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 32), (32, 16)])
def test_chunks_of_everything(device, encoding, block_m, block_n):
    """Prefix, spans (from the middle of one), question; an ordinary prompt; a decode."""
    table = make_table(20, [18, 3], 9, 16)
    requests = [
        Request(table, 40, table.num_prompt_tokens),
        Request(None, 0, 7),
        decode(table, 4),
        Request(table, 13, 37),
    ]
    heads = Heads(num_heads=6, num_kv_heads=2)
    batch = Batch(requests, heads, encoding, device=device)
    out = run_paged(batch, block_m=block_m, block_n=block_n)
    assert max_error(out, batch.expected(0.25)) < FLOAT32


@encodings
@pytest.mark.parametrize(
    "heads",
    [
        Heads(num_heads=3, num_kv_heads=1, head_size=64, rotary_dim=64),
        Heads(num_heads=2, num_kv_heads=2, head_size=80, rotary_dim=80),
        Heads(num_heads=2, num_kv_heads=1, head_size=80, rotary_dim=32, is_neox=False),
        Heads(num_heads=7, num_kv_heads=1, head_size=96, rotary_dim=24),
        Heads(num_heads=2, num_kv_heads=1, head_size=128, rotary_dim=128, is_neox=False),
        Heads(num_heads=1, num_kv_heads=1, head_size=256, rotary_dim=64, mscale=1.2),
        Heads(num_heads=20, num_kv_heads=1, head_size=32, rotary_dim=32),
    ],
    ids=str,
)
def test_heads(device, encoding, heads):
    table = make_table(0, [30, 18], 6, 16)
    batch = Batch([Request(table, 65, table.num_prompt_tokens)], heads, encoding, device=device)
    block_m = 32 if heads.num_heads == 20 else 16
    out = run_paged(batch, scale=heads.head_size**-0.5, block_m=block_m, spans=False)
    assert max_error(out, batch.expected(heads.head_size**-0.5)) < FLOAT32


@encodings
@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_block_sizes(device, encoding, block_size):
    table = make_table(7, [50, 20], 5, block_size)
    batch = Batch([decode(table, 2)], Heads(), encoding, block_size=block_size, device=device)
    assert max_error(run_paged(batch, block_n=32), batch.expected(0.25)) < FLOAT32


@encodings
@pytest.mark.parametrize("offsets", ["compact", "padded"])
def test_hidden_markers(device, encoding, offsets):
    """A span of nothing but its marker is an empty segment among others."""
    table = make_table(20, [18, 1, 1, 12], 7, 16, see_markers=False, offsets=offsets)
    batch = Batch([question(table), Request(table, 35, 60)], Heads(), encoding, device=device)
    assert max_error(run_paged(batch), batch.expected(0.25)) < FLOAT32


@encodings
@pytest.mark.parametrize("seen", [0, 1, 16, 25])
def test_a_prefix_whose_end_only_spans_see(device, encoding, seen):
    table = make_table(27, [18, 3, 12], 7, 16, seen_prefix=seen)
    end = table.num_prompt_tokens
    starts = (table.last.start, end, 0, table.segments[1].start)
    requests = [Request(table, start, max(end, start + 1)) for start in starts]
    batch = Batch(requests, Heads(), encoding, device=device)
    assert max_error(run_paged(batch), batch.expected(0.25)) < FLOAT32


@encodings
def test_nothing_to_see_is_zero(device, encoding):
    table = make_table(0, [1, 20], 7, 16, see_markers=False)
    batch = Batch([question(table)], Heads(), encoding, device=device)
    rows, segments = batch.rows()
    segments.end.zero_()
    batch.rows = lambda spans: (rows, segments)  # type: ignore[method-assign]
    assert torch.equal(run_paged(batch), torch.zeros_like(batch.query))


@encodings
def test_other_tokens_are_left_alone(device, encoding):
    table = make_table(16, [18], 7, 16)
    batch = Batch([Request(table, 16, table.num_prompt_tokens)], Heads(), encoding, device=device)
    out = run_paged(batch, spans=False)
    assert out[:32].isnan().all()
    assert max_error(out[32:], batch.expected(0.25)[32:]) < FLOAT32


@encodings
def test_soft_cap(device, encoding):
    table = make_table(16, [18, 30], 4, 16)
    batch = Batch([question(table)], Heads(), encoding, device=device)
    out = run_paged(batch, scale=1.0, soft_cap=3.0)
    assert max_error(out, batch.expected(1.0, soft_cap=3.0)) < FLOAT32


@encodings
@pytest.mark.parametrize("window", [5, 40])
def test_window_counts_logical_positions(device, encoding, window):
    table = make_table(16, [18, 30], 6, 16)
    requests = [question(table), decode(table, 3), Request(table, 56, 66)]
    batch = Batch(requests, Heads(), encoding, device=device)
    out = run_paged(batch, window=window)
    assert max_error(out, batch.expected(0.25, window=window)) < FLOAT32


@encodings
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(device, encoding, dtype):
    heads = Heads(head_size=64, rotary_dim=64)
    table = make_table(16, [40, 30], 8, 16)
    batch = Batch([question(table)], heads, encoding, dtype=dtype, device=device)
    out = run_paged(batch, scale=0.125)
    assert relative_error(out, batch.expected(0.125)) < SIXTEEN_BITS[dtype]


@encodings
def test_tiles_of_64_rows_keep_the_query_in_registers(device, encoding):
    table = make_table(16, [20], 30, 16)
    batch = Batch([question(table)], Heads(), encoding, dtype=torch.bfloat16, device=device)
    out = run_paged(batch, block_m=64)
    assert relative_error(out, batch.expected(0.25)) < SIXTEEN_BITS[torch.bfloat16]


FP8 = {"cache_dtype": torch.float8_e4m3fn, "k_scale": 0.5, "v_scale": 2.0}
FP8_QUERY = {"query_dtype": torch.float8_e4m3fn, "q_scale": 0.25}


@encodings
@pytest.mark.parametrize("query", [{}, FP8_QUERY], ids=["16-bit query", "fp8 query"])
@pytest.mark.parametrize(
    "heads",
    [
        Heads(),
        Heads(num_heads=6, num_kv_heads=2, head_size=80, rotary_dim=32, is_neox=False),
        Heads(num_heads=2, num_kv_heads=1, head_size=256, rotary_dim=256),
    ],
    ids=str,
)
def test_fp8(device, encoding, query, heads):
    """Against the values that the cache holds: its own rounding is not the kernel's."""
    table = make_table(16, [40, 21], 5, 16)
    batch = Batch(
        [question(table), Request(table, 40, 70), decode(table, 3)], heads, encoding,
        dtype=torch.bfloat16, device=device, **FP8, **query,
    )  # fmt: skip
    scale = heads.head_size**-0.5
    out = run_paged(batch, scale=scale, block_n=32)
    assert relative_error(out, batch.expected(scale)) < SIXTEEN_BITS[torch.bfloat16]


@encodings
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_fp8_in_wide_tiles(device, encoding, soft_cap):
    table = make_table(16, [40, 21], 30, 16)
    batch = Batch(
        [question(table)], Heads(), encoding, dtype=torch.bfloat16, device=device, **FP8,
        **FP8_QUERY,
    )  # fmt: skip
    out = run_paged(batch, soft_cap=soft_cap, block_m=64, num_workers=2)
    expected = batch.expected(0.25, soft_cap=soft_cap)
    assert relative_error(out, expected) < SIXTEEN_BITS[torch.bfloat16]


@encodings
@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_fp8_scales_matter(device, encoding, name):
    """The limit above would notice one that is left out."""
    table = make_table(16, [40], 5, 16)
    batch = Batch(
        [question(table)], Heads(), encoding, dtype=torch.bfloat16, device=device, **FP8,
        **FP8_QUERY,
    )  # fmt: skip
    expected = batch.expected(0.25)
    setattr(batch, name, 1.0)
    assert relative_error(run_paged(batch), expected) > 0.05
