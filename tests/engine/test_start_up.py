"""Start-up: half a plugin and options of vLLM's that exclude spans are refused, each by name."""

from __future__ import annotations

from typing import Any

import pytest

from minipic_backend import ConfigurationError, Engine
from minipic_backend.engines.driver import EngineDriver
from minipic_backend.plugin import register

SCHEDULER = "minipic_backend.plugin.scheduler.SpanScheduler"
WORKER = "minipic_backend.plugin.cpu_worker.SpanCPUWorker"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 2,
                    "prompt_lookup_max": 3,
                }
            },
            "speculative decoding",
        ),
        ({"kv_cache_dtype": "fp8"}, "fp8"),
        ({"enable_prefix_caching": False}, "prefix caching"),
        ({"runner": "pooling"}, "pooling"),
        ({"block_size": 64, "additional_config": {"minipic": {"block_size": 32}}}, "block_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_exclude_spans(model: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Engine(model, max_model_len=512, kv_cache_gib=0.05, **options)


def test_a_second_engine_that_offloads_its_cache(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would hand it the first one's connector, and with it the first one's cache."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", object())
    with pytest.raises(ConfigurationError, match="offloads its cache already"):
        Engine(model, max_model_len=512, kv_cache_gib=0.05, kv_offloading_size=0.1)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"scheduler_cls": SCHEDULER}, "additional_config"),
        ({"worker_cls": WORKER}, "additional_config"),
        ({"scheduler_cls": SCHEDULER, "worker_cls": WORKER}, "additional_config"),
        ({"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}, "worker_cls"),
    ],
    ids=["scheduler", "worker", "both", "another worker"],
)
def test_half_a_plugin(model: str, parts: dict[str, str], words: str) -> None:
    spans = {"additional_config": {"minipic": {}}} if words == "worker_cls" else {}
    register()
    with pytest.raises(ConfigurationError, match=words):
        EngineDriver(
            {
                "model": model,
                "enforce_eager": True,
                "max_model_len": 512,
                "kv_cache_memory_bytes": 2**25,
                **parts,
                **spans,
            }
        )


def test_registering_again_changes_nothing() -> None:
    from vllm.engine.arg_utils import EngineArgs

    register()
    once = EngineArgs.create_engine_config
    register()
    assert EngineArgs.create_engine_config is once


def test_parts_are_where_the_check_wants_them(exact_rig: Any) -> None:
    from minipic_backend.plugin.cpu_attention import SpanCPUImpl, SpanCPUMetadataBuilder
    from minipic_backend.plugin.cpu_worker import SpanCPUModelRunner, SpanCPUWorker
    from minipic_backend.plugin.hasher import SpanBlockHasher
    from minipic_backend.plugin.scheduler import SpanScheduler

    runner = exact_rig.runner
    assert isinstance(exact_rig.scheduler, SpanScheduler)
    assert isinstance(exact_rig.scheduler.span_hasher, SpanBlockHasher)
    assert isinstance(runner, SpanCPUModelRunner)
    executor = exact_rig.driver.llm.engine_core.engine_core.model_executor
    assert isinstance(executor.driver_worker.worker, SpanCPUWorker)
    layers = runner.compilation_config.static_forward_context.values()
    assert all(isinstance(layer.impl, SpanCPUImpl) for layer in layers)
    builder = runner.attn_groups[0][0].get_metadata_builder(0)
    assert isinstance(builder, SpanCPUMetadataBuilder)


def test_a_request_past_the_hasher_is_refused(exact_rig: Any) -> None:
    """As it would be if something had put vLLM's own hasher back."""
    scheduler = exact_rig.scheduler
    request = exact_rig.request([10, 11], hasher=exact_rig.stock_hasher)
    with pytest.raises(ConfigurationError, match="hasher"):
        exact_rig.call(scheduler.add_request, request)
    assert "probe" not in scheduler.requests
