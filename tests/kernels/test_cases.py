"""The cases themselves: on a GPU, all that a kernel is given must lie there."""

from __future__ import annotations

import torch
from cases import Batch, Heads, Request, make_table

from minipic_backend.attention.rows import RowSegments


def test_all_that_a_kernel_gets_is_on_its_device(monkeypatch):
    monkeypatch.setattr(RowSegments, "pack", lambda seen, device: device)
    batch = Batch(
        [Request(make_table(16, [18], 5, 16), 0, 48)], Heads(), "unrotated", device="meta"
    )
    rows, segments = batch.rows()
    given = [batch.query, batch.key_cache, batch.value_cache, batch.out, batch.rotary.cos_sin]
    given += [rows.query_start, rows.query_end, rows.seq_lens, rows.block_table]
    assert segments == "meta"
    assert {tensor.device for tensor in given} == {torch.device("meta")}
