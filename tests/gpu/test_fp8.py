"""An fp8 KV cache with a real small model and CUDA graphs: `pytest tests/gpu/test_fp8.py -s`.

fp8 has 3 bits of mantissa, and 30 layers make much of little: SmolLM2 in float32 on a CPU, with
queries, keys and values rounded to fp8, is 7e-3 to 1e-1 from the exact answers (KL, by prompt; the
queries, which stock vLLM rounds as well, cost as much as the cache), and two such runs that differ
by noise of bfloat16's size are 5e-3 to 5e-2 from each other. A wrong frame is 3e-1 to 1. So means
over prompts are held to limits between; `test_shapes.py` has two layers and narrow ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_cuda_engine import MARKERS, Reference, Rig, kl, prompt

from minipic_backend.config import CONFIG_KEY, SpanConfig, SpanOptions
from minipic_backend.engines.driver import EngineDriver
from minipic_backend.models import ensure_smollm2
from minipic_backend.plugin import register
from minipic_backend.spans.segments import parse_segments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

REFERENCE_KL = 0.1
RUNS_KL = 0.06
ORDERS = ([0, 1, 2, 3, 4], [3, 1], [2, 0, 4], [4, 3], [1], [2, 4, 1, 0])


class Fp8Rig(Rig):
    def __init__(self) -> None:
        register()
        self.config = SpanConfig(**MARKERS, block_size=16)
        self.driver = EngineDriver(
            {
                "model": str(ensure_smollm2(progress=False)),
                "kv_cache_dtype": "fp8",
                "max_model_len": 4096,
                "max_num_seqs": 16,
                "gpu_memory_utilization": 0.1,
                "kv_cache_memory_bytes": 2**30,
                "max_logprobs": -1,
                "additional_config": {CONFIG_KEY: {**MARKERS}},
            }
        )
        self.tokenizer = self.driver.llm.get_tokenizer()


@pytest.fixture(scope="module")
def rig() -> Iterator[Fp8Rig]:
    made = Fp8Rig()
    yield made
    made.driver.close()


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_the_cache_is_fp8(rig: Fp8Rig) -> None:
    executor = rig.driver.llm.engine_core.engine_core.model_executor
    caches = executor.driver_worker.worker.model_runner.kv_caches
    assert {cache.dtype.itemsize for cache in caches} == {1}


def test_cold_warm_and_mixed_are_as_far_from_the_reference_as_fp8_is(
    rig: Fp8Rig, reference: Reference
) -> None:
    options = SpanOptions()
    prompts = [prompt(rig, order) for order in ORDERS]
    tables = [parse_segments(ids, rig.config, options) for ids in prompts]
    want = [
        reference.logits(ids, table)[-1].double().log_softmax(-1)
        for ids, table in zip(prompts, tables, strict=True)
    ]
    runs: dict[str, list[Any]] = {"cold": [], "warm": [], "mixed": []}
    for ids in prompts:
        rig.reset()
        _, cold, cached = rig.run(ids, options)
        assert cached == 0
        _, warm, cached = rig.run(ids, options)
        assert cached > 0
        runs["cold"].append(cold)
        runs["warm"].append(warm)
    rig.reset()
    busy = rig.submit([token for token in prompts[0] if token not in MARKERS.values()], None, 40)
    handles = [rig.submit(ids, options) for ids in prompts]
    runs["mixed"] = [rig.read(handle)[1] for handle in handles]
    rig.read(busy)
    far = {name: mean([*map(kl, want, found)]) for name, found in runs.items()}
    apart = {name: mean([*map(kl, runs["cold"], found)]) for name, found in runs.items()}
    print("KL of reference", {name: f"{value:.1e}" for name, value in far.items()})
    print("KL of cold", {name: f"{value:.1e}" for name, value in apart.items()})
    assert max(far.values()) < REFERENCE_KL
    assert max(apart.values()) < RUNS_KL


def test_decode_follows_the_reference(rig: Fp8Rig, reference: Reference) -> None:
    """Through FULL graphs; the mean gap of a wrong decode is above 1."""
    options = SpanOptions()
    rig.reset()
    prompts = [prompt(rig, order) for order in ORDERS[:3]]
    handles = [rig.submit(ids, options, 32) for ids in prompts]
    gaps = []
    for ids, handle in zip(prompts, handles, strict=True):
        tokens, _, _ = rig.read(handle)
        whole = [*ids, *tokens]
        logits = reference.logits(whole, parse_segments(whole, rig.config, options))
        rows = logits[len(ids) - 1 : -1].double().log_softmax(-1)
        chosen = rows[torch.arange(len(tokens)), torch.tensor(tokens)]
        gaps.append(float((rows.max(-1).values - chosen).mean()))
    print("mean gaps to the reference's choice", [f"{gap:.3f}" for gap in gaps])
    assert mean(gaps) < 0.3
