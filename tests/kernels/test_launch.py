"""Inputs that do not fit each other are refused before a launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Batch, Heads, Request

from minipic_backend.attention.geometry import Geometry
from minipic_backend.attention.launch import check_inputs
from minipic_backend.attention.work import WorkPlan

FP8_QUERY = torch.zeros(4, 2, 32).to(torch.float8_e4m3fn)
BYTES = torch.zeros(3, 16, 2, 32, dtype=torch.uint8)  # how vLLM keeps an fp8 cache
E5M2 = BYTES.view(torch.float8_e5m2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(4, 3, 32)}, "query"),
        ({"query": torch.zeros(4, 2, 64)[..., ::2]}, "dense"),
        ({"value_cache": torch.zeros(3, 16, 1, 32)}, "strides"),
        ({"out": torch.zeros(5, 2, 32)}, "output"),
        ({"out": torch.zeros(4, 2, 32, dtype=torch.bfloat16)}, "query torch.float32"),
        ({"query": FP8_QUERY, "out": FP8_QUERY}, "output torch.float8_e4m3fn"),
        ({"query": FP8_QUERY}, None),
        ({"key_cache": BYTES, "value_cache": BYTES}, "cache of torch.uint8"),
        ({"key_cache": E5M2, "value_cache": E5M2}, "cache of torch.float8_e5m2"),
        ({"geometry": Geometry(16, 32, 4, 2)}, "block sizes"),
        ({"geometry": Geometry(32, 16, 4, 2)}, None),
    ],
)
def test_inputs_are_checked(change, message):
    batch = Batch([Request(None, 0, 4)], Heads(num_kv_heads=2), "span_local")
    rows, _ = batch.rows()
    inputs = {
        "query": batch.query, "key_cache": batch.key_cache, "value_cache": batch.value_cache,
        "rows": rows, "plan": WorkPlan.allocate(1, 4, 1, 16, 16), "rotary": batch.rotary,
        "out": batch.out, "geometry": Geometry(16, 16, 4, 2),
    } | change  # fmt: skip
    if message is None:
        check_inputs(**inputs)
        return
    with pytest.raises(ValueError, match=message):
        check_inputs(**inputs)


def test_rotary_tables_are_checked():
    batch = Batch([Request(None, 0, 4)], Heads(num_kv_heads=2), "span_local")
    rows, _ = batch.rows()
    for table in (torch.zeros(9, 64), torch.zeros(9, 32, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="rotary"):
            check_inputs(
                batch.query, batch.key_cache, batch.value_cache, rows,
                WorkPlan.allocate(1, 4, 1, 16, 16), replace(batch.rotary, cos_sin=table),
                batch.out, Geometry(16, 16, 4, 2),
            )  # fmt: skip
