"""No batch may need a kernel that the warm-up did not compile."""

from __future__ import annotations

import pytest
import torch
from cases import Batch, Heads, Request, make_table

from minipic_backend.attention.geometry import AttentionShape, choose_geometry
from minipic_backend.attention.naive import naive_varlen_attention
from minipic_backend.attention.warmup import query_lengths, warm_up


@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 16, 20, 71])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("unrotated", [False, True])
def test_every_geometry_is_met(head_size, group, itemsize, unrotated):
    shape = AttentionShape(group, 1, head_size, 16, itemsize, unrotated)
    met = {choose_geometry(shape, n) for n in query_lengths(shape)}
    assert met == {choose_geometry(shape, n) for n in range(1, 3000)}


@pytest.mark.parametrize("encoding", ["span_local", "unrotated"])
def test_it_runs_what_it_says(device, encoding):
    """Also where the cache has less than a batch's blocks."""
    batch = Batch([Request(make_table(16, [18], 5, 16), 0, 48)], Heads(), encoding, device=device)
    heads = batch.heads
    shape = AttentionShape(
        heads.num_heads, heads.num_kv_heads, heads.head_size, batch.block_size, itemsize=4,
        unrotated=encoding == "unrotated",
    )  # fmt: skip
    calls = []

    def attend(**arguments):
        calls.append(arguments["causal"])
        return naive_varlen_attention(**arguments)

    count = warm_up(
        shape, batch.key_cache, batch.value_cache, batch.rotary, dtype=torch.float32, max_rows=1,
        max_tokens=64, scale=0.25, attend=attend,
    )  # fmt: skip
    num_lengths = len(query_lengths(shape))
    if encoding == "unrotated":
        assert (count, calls) == (num_lengths, [])
    else:
        assert (count, calls) == (num_lengths + 1, [True])
