"""Two ranks with a KV head each: `pytest tests/gpu/test_tensor_parallel.py`, on two GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_shapes import RUNS_KL, Case, Reference, ShapeRig, kl

from minipic_backend.config import SpanOptions
from minipic_backend.spans.segments import parse_segments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


@pytest.mark.parametrize("encoding", ["span_local", "unrotated"])
def test_cold_and_warm_equal_the_reference(tmp_path: Path, encoding: str) -> None:
    from transformers import AutoModelForCausalLM

    case = Case("llama", (8, 2, 64), encoding)
    folder = case.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    reference = Reference(model.float().eval())
    # With FULL graphs: both ranks must choose the same one at each step.
    rig = ShapeRig(case, folder, tensor_parallel_size=2, enforce_eager=False)
    try:
        ids = rig.prompt([0, 1, 2, 3, 4])
        table = parse_segments(ids, rig.config, SpanOptions())
        want = reference.logits(ids, table)[-1].double().log_softmax(-1)
        _, cold, cached = rig.run(ids, SpanOptions())
        assert cached == 0
        _, warm, cached = rig.run(ids, SpanOptions())
        assert cached > 0
        assert max(kl(want, cold), kl(want, warm)) < case.reference_kl
        assert kl(cold, warm) < RUNS_KL
        tokens, _, _ = rig.run(ids, SpanOptions(), 24)
        whole = [*ids, *tokens]
        rows = reference.logits(whole, parse_segments(whole, rig.config, SpanOptions()))
        rows = rows[len(ids) - 1 : -1].double().log_softmax(-1)
        chosen = rows[torch.arange(len(tokens)), torch.tensor(tokens)]
        assert (rows.max(-1).values - chosen).max() < 0.3
    finally:
        rig.driver.close()
