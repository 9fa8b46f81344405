"""Spans that were evicted from the GPU come back from host memory, at another offset.

vLLM's own offload (`kv_offloading_size`), on one GPU: `pytest tests/gpu/test_offload.py -s`, about
three minutes. `reset_prefix_cache` empties the GPU's cache and leaves the host's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_cuda_engine import MARKERS, RUNS_KL, SIZE, Rig, kl, prompt

from minipic_backend.bench.engines import open_session
from minipic_backend.bench.prompts import RandomPrompts
from minipic_backend.config import CONFIG_KEY, SpanOptions
from minipic_backend.engines.driver import EngineDriver
from minipic_backend.models import ensure_smollm2
from minipic_backend.plugin import register

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


class OffloadRig(Rig):
    """An engine with a GiB of host memory behind its cache; eager, for a quick start."""

    def __init__(self) -> None:
        register()
        self.driver = EngineDriver(
            {
                "model": str(ensure_smollm2(progress=False)),
                "enforce_eager": True,
                "max_model_len": 4096,
                "max_num_seqs": 32,
                "gpu_memory_utilization": 0.1,
                "kv_cache_memory_bytes": 2**30,
                "max_logprobs": -1,
                "kv_offloading_size": 1.0,
                "additional_config": {CONFIG_KEY: {**MARKERS}},
            }
        )
        self.tokenizer = self.driver.llm.get_tokenizer()


def test_loading_is_faster_than_computing() -> None:
    """8B shape, ten documents of 1,000 tokens: 1.3 GB from the host or 10,000 tokens computed."""
    arguments = {
        "enforce_eager": True,
        "max_model_len": 16384,
        "max_num_seqs": 32,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 8 * 2**30,
        "kv_offloading_size": 16.0,
    }
    shape = "shape:llama-3-8b"
    with open_session("span_local", shape, arguments, separate_process=False) as session:
        driver = session.driver
        source = RandomPrompts(0, SIZE)
        loaded, computed = [], []
        for _ in range(3):
            prefix, spans = source.prefix(64), [source.span(1000) for _ in range(10)]

            def ttft(prefix: list[int] = prefix, spans: list[list[int]] = spans) -> float:
                order = source.shuffled(spans)
                ids = prefix + [token for span in order for token in span] + source.question(50)
                return time_of(driver, ids)

            computed.append(ttft())
            settle(driver)
            assert driver.call(lambda llm: llm.reset_prefix_cache())
            loaded.append(ttft())
        times = [1000 * statistics.median(one) for one in (computed, loaded)]
        print(f"time to first token: computed {times[0]:.0f} ms, loaded {times[1]:.0f} ms")
        assert times[1] < times[0]


@pytest.fixture(scope="module")
def rig() -> Iterator[OffloadRig]:
    made = OffloadRig()
    yield made
    made.driver.close()


def test_evicted_spans_come_back_at_another_offset(rig: OffloadRig) -> None:
    options = SpanOptions()
    rig.run(prompt(rig, range(5)), options)
    settle(rig.driver)
    rig.reset()
    ids = prompt(rig, [3, 1, 4, 0, 2])
    _, loaded, cached = rig.run(ids, options)
    # All but the text behind the documents, and what follows it: nothing of it was on the GPU.
    assert cached > 0.6 * len(ids)
    assert rig.driver.call(lambda llm: llm.reset_prefix_cache(reset_connector=True))
    _, cold, cached = rig.run(ids, options)
    assert cached == 0
    assert kl(cold, loaded) < RUNS_KL


def test_documents_on_the_host_and_on_the_gpu_mix_with_new_ones(rig: OffloadRig) -> None:
    options = SpanOptions()
    assert rig.driver.call(lambda llm: llm.reset_prefix_cache(reset_connector=True))
    rig.run(prompt(rig, [0, 1]), options)
    settle(rig.driver)
    rig.reset()
    rig.run(prompt(rig, [2]), options)  # this one, and the prefix, are on the GPU
    ids = prompt(rig, [3, 1, 2, 0, 4])
    _, mixed, cached = rig.run(ids, options)
    assert 0 < cached < len(ids)
    assert rig.driver.call(lambda llm: llm.reset_prefix_cache(reset_connector=True))
    _, cold, _ = rig.run(ids, options)
    assert kl(cold, mixed) < RUNS_KL


def test_nothing_is_left_in_use(rig: OffloadRig) -> None:
    settle(rig.driver)
    pool = rig.scheduler.kv_cache_manager.block_pool
    assert rig.driver.call(lambda llm: pool.get_num_free_blocks()) == pool.num_gpu_blocks - 1
    assert rig.scheduler.planner.num_jobs == 0
    assert not rig.scheduler.holds


def settle(driver: EngineDriver) -> None:
    """Until what was computed has been written to the host, and no request is left."""
    deadline = time.monotonic() + 20

    def idle(llm: Any) -> bool:
        llm.step()
        return not llm.engine_core.engine_core.scheduler.has_requests()

    while not driver.call(idle):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def time_of(driver: EngineDriver, ids: list[int]) -> float:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    started = time.perf_counter()
    for _ in driver.submit(ids, params).deltas():
        pass
    return time.perf_counter() - started
