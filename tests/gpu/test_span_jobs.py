"""Spans computed by jobs, on a GPU: as good as in place, though their pads are left out.

The cache is filled with numbers that would show if anybody read a slot that was never written.
`pytest tests/gpu/test_span_jobs.py`, about two minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_cuda_engine import (
    MARKERS,
    OPTIONS,
    REFERENCE_KL,
    RUNS_KL,
    Reference,
    Rig,
    kl,
    mean_kl,
    prompt,
)

from minipic_backend.config import CONFIG_KEY, SpanConfig
from minipic_backend.engines.driver import EngineDriver
from minipic_backend.models import ensure_smollm2
from minipic_backend.plugin import register
from minipic_backend.plugin.span_jobs import JOB_PREFIX
from minipic_backend.spans.segments import parse_segments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SPOILED = 1e3


class JobRig(Rig):
    """An engine whose steps have rows to spare: every span that is missing becomes a job."""

    def __init__(self, encoding: str) -> None:
        register()
        self.config = SpanConfig(**MARKERS, block_size=16, key_encoding=encoding)  # type: ignore[arg-type]
        self.driver = EngineDriver(
            {
                "model": str(ensure_smollm2(progress=False)),
                "enforce_eager": True,
                "max_model_len": 4096,
                "max_num_seqs": 64,
                "max_num_batched_tokens": 512,
                "gpu_memory_utilization": 0.1,
                "kv_cache_memory_bytes": 2**30,
                "max_logprobs": -1,
                "additional_config": {CONFIG_KEY: {**MARKERS, "key_encoding": encoding}},
            }
        )
        self.tokenizer = self.driver.llm.get_tokenizer()
        self.jobs: set[str] = set()
        schedule = self.scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.jobs.update(i for i in output.num_scheduled_tokens if i.startswith(JOB_PREFIX))
            return output

        self.driver.call(lambda llm: setattr(self.scheduler, "schedule", watched))

    def spoil(self) -> None:
        """An empty cache, full of numbers far outside of what keys and values hold."""
        self.reset()
        executor = self.driver.llm.engine_core.engine_core.model_executor
        caches = executor.driver_worker.worker.model_runner.kv_caches
        self.driver.call(lambda llm: [cache.fill_(SPOILED) for cache in caches])


@pytest.fixture(scope="module", params=["span_local", "unrotated"])
def rig(request: pytest.FixtureRequest) -> Iterator[JobRig]:
    made = JobRig(request.param)
    yield made
    made.driver.close()


@pytest.fixture(scope="module")
def reference() -> Reference:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        ensure_smollm2(progress=False), dtype=torch.float32, attn_implementation="eager"
    )
    return Reference(model.eval())


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: f"{o.frame}-{o.offsets}")
def test_jobs_equal_the_reference_and_in_place(
    rig: JobRig, reference: Reference, options: Any
) -> None:
    ids = prompt(rig, range(5))
    want = reference.logits(ids, parse_segments(ids, rig.config, options))[-1]
    want = want.double().log_softmax(-1)
    answers = {}
    for policy in ("interleaved", "batched", "in_place"):
        rig.spoil()
        rig.scheduler.planner.policy = policy
        rig.jobs.clear()
        _, answers[policy], cached = rig.run(ids, options)
        assert bool(rig.jobs) is (policy != "in_place")
        assert cached == 0  # what its own jobs computed was not found
    rig.scheduler.planner.policy = "interleaved"
    for policy, answer in answers.items():
        print(f"KL {policy} {kl(want, answer):.2e}")
        assert kl(want, answer) < REFERENCE_KL
        assert kl(answers["in_place"], answer) < RUNS_KL


def test_a_batch_that_shares_documents_decodes_as_each_does_alone(rig: JobRig) -> None:
    """Greedy tokens may fall apart where two are as likely as each other: the first ones count."""
    options = OPTIONS[0]
    prompts = [prompt(rig, order) for order in ([0, 1, 2], [3, 2, 1], [4, 0], [2, 4, 3, 1])]
    alone = []
    for ids in prompts:
        rig.spoil()
        alone.append(rig.run(ids, options)[1])
    rig.spoil()
    handles = [rig.submit(ids, options) for ids in prompts]
    together = [rig.read(handle)[1] for handle in handles]
    assert mean_kl(alone, together) < RUNS_KL
    assert rig.scheduler.planner.num_jobs == 0
    assert not rig.scheduler.holds
