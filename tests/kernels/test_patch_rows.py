"""Prompts with patches: what replaced tokens hold (NaN here) reaches no query behind a patch."""

from __future__ import annotations

import pytest
import torch
from cases import Batch, Heads, Request, make_patched
from paged import max_error, run_paged
from test_compact import check, run_compact

encodings = pytest.mark.parametrize("encoding", ["span_local", "unrotated"])
SPANS = [34, 20, 17]
HEADS = [(0, 0, 16), (1, 0, 16), (2, 0, 16)]
BLOCKS = [(0, 16, 34), (1, 0, 16)]
ODD = [(2, 3, 9), (0, 20, 33, 5), (1, 18, 19)]


def behind_spans(table):
    """From inside the first patch to the end, and a decode."""
    end = table.num_prompt_tokens
    patch = next(s for s in table.segments if s.replaced)
    return [Request(table, patch.start + 1, end), Request(table, end + 2, end + 3)]


@encodings
@pytest.mark.parametrize("patches", [HEADS, BLOCKS, ODD], ids=["heads", "blocks", "odd"])
@pytest.mark.parametrize("frame", ["none", "prefix"])
def test_paged(device, encoding, patches, frame):
    table = make_patched(19, SPANS, patches, 9, 16, frame=frame)
    batch = Batch(behind_spans(table), Heads(), encoding, device=device)
    out = run_paged(batch, block_m=32, block_n=32)
    mine = ~batch.is_pad()
    assert max_error(out[mine], batch.expected(0.25)[mine]) < 1e-5


@encodings
def test_paged_hidden_markers_and_padded_offsets(device, encoding):
    table = make_patched(16, [20, 17], [(0, 0, 16), (1, 16, 17)], 5, 16,
                         see_markers=False, offsets="padded")  # fmt: skip
    batch = Batch(behind_spans(table), Heads(), encoding, device=device)
    out = run_paged(batch, num_workers=7)
    mine = ~batch.is_pad()
    assert max_error(out[mine], batch.expected(0.25)[mine]) < 1e-5


@pytest.mark.parametrize("patches", [HEADS, BLOCKS, ODD], ids=["heads", "blocks", "odd"])
@pytest.mark.parametrize("max_keys", [150, 10**6])
def test_compact(device, patches, max_keys):
    table = make_patched(19, SPANS, patches, 9, 16)
    batch = Batch(
        behind_spans(table), Heads(num_heads=6, num_kv_heads=2), "span_local", device=device
    )
    run_compact(batch, max_keys=max_keys)
    check(batch, batch.expected(0.25))


def test_a_patch_matters(device):
    """The limits above would notice if the replaced tokens were seen instead."""
    table = make_patched(19, SPANS, HEADS, 9, 16)
    batch = Batch([Request(table, 0, table.num_prompt_tokens)], Heads(), "span_local")
    right = batch.expected(0.25)
    plain = make_patched(19, SPANS, [(0, 0, 16)], 9 + 32, 16)
    assert plain.num_prompt_tokens == table.num_prompt_tokens
    batch.requests = [Request(plain, 0, table.num_prompt_tokens)]
    assert (right - batch.expected(0.25))[-1].abs().max() > 1e-3
    assert torch.isfinite(right).all()
