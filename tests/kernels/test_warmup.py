"""No batch may need a kernel that the warm-up did not compile."""

from __future__ import annotations

import pytest
import torch
from cases import Batch, Heads, Request, make_table

from minipic_backend.attention import dispatch, warmup
from minipic_backend.attention.geometry import AttentionShape, choose_geometry
from minipic_backend.attention.naive import naive_varlen_attention
from minipic_backend.attention.warmup import most_items, most_rows, query_lengths, warm_up
from minipic_backend.attention.work import _bucket, _max_items, bucket_sizes


@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 16, 20, 71])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("unrotated", [False, True])
def test_every_geometry_is_met(head_size, group, itemsize, unrotated):
    shape = AttentionShape(group, 1, head_size, 16, itemsize, unrotated)
    met = {choose_geometry(shape, n) for n in query_lengths(shape)}
    assert met == {choose_geometry(shape, n) for n in range(1, 3000)}


@pytest.mark.parametrize("group", [1, 4, 20])
@pytest.mark.parametrize(("max_reqs", "max_tokens"), [(1, 16), (4, 700), (256, 8192)])
def test_every_size_of_a_plan_is_met(group, max_reqs, max_tokens):
    """The worst batches: one token of each of many requests, and chunks of whole blocks."""
    shape = AttentionShape(group, 1, 64, 16)
    num_rows = most_rows(shape, max_reqs, max_tokens)
    num_items = most_items(shape, max_reqs, max_tokens)
    met = {_bucket(n) for n in bucket_sizes(num_items)}
    met_rows = {_bucket(min(n, num_rows)) for n in bucket_sizes(num_items)}
    for lengths in (
        [1] * min(max_reqs, max_tokens),
        [1, *[16] * ((max_tokens - 2) // 16), 1],
        [5] * (max_tokens // 16),
        [max_tokens],
    ):
        geometry = choose_geometry(shape, max(lengths))
        tokens = sum(lengths)
        items = _max_items(len(lengths), tokens, geometry.block_m // group)
        assert _bucket(items) in met
        assert _bucket(len(lengths)) in met_rows


@pytest.mark.parametrize("encoding", ["span_local", "unrotated"])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_it_runs_every_kernel(device, encoding, is_fp8, monkeypatch):
    """Also where the cache has less than a batch's blocks."""
    monkeypatch.setattr(dispatch, "_num_sms", lambda device: 16)
    fp8 = {"cache_dtype": torch.float8_e4m3fn, "query_dtype": torch.float8_e4m3fn}
    batch = Batch(
        [Request(make_table(16, [18], 5, 16), 0, 48)], Heads(), encoding, device=device,
        dtype=torch.bfloat16, **(fp8 if is_fp8 else {}),
    )  # fmt: skip
    heads = batch.heads
    shape = AttentionShape(
        heads.num_heads, heads.num_kv_heads, heads.head_size, batch.block_size,
        unrotated=encoding == "unrotated",
    )  # fmt: skip
    calls, ran = [], set()

    def attend(**arguments):
        calls.append(arguments["causal"])
        return naive_varlen_attention(**arguments)

    for kernel in warmup.KERNELS:
        monkeypatch.setattr(
            kernel, "run",
            lambda *args, _name=kernel.fn.__name__, _run=kernel.run, **kwargs: (
                ran.add(_name), _run(*args, **kwargs)
            ),
        )  # fmt: skip
    warm_up(
        shape, batch.key_cache, batch.value_cache, batch.rotary, dtype=torch.bfloat16,
        query_dtype=batch.query.dtype, max_reqs=1, max_tokens=90, scale=0.25,
        attend=None if is_fp8 else attend,
    )  # fmt: skip
    wanted = {"items_kernel", "pieces_kernel", "merge_kernel", f"{encoding}_kernel"}
    if encoding == "span_local" and not is_fp8:
        wanted.add("compact_kernel")
        assert calls == [True]
    else:
        assert calls == []
    assert ran == wanted
