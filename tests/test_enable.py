"""What a configuration of vLLM's may not have beside spans, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest

pytest.importorskip("vllm")

from minipic_backend.config import SpanConfig
from minipic_backend.errors import ConfigurationError
from minipic_backend.plugin import enable
from minipic_backend.plugin.enable import _connector_faults


def faults(connector: str | None, *, events: bool | None = None) -> list[str]:
    """What is wrong with a KV connector; `events` None: nothing is configured about events."""
    config: Any = SimpleNamespace(
        kv_transfer_config=None if connector is None else SimpleNamespace(kv_connector=connector),
        kv_events_config=None if events is None else SimpleNamespace(enable_kv_cache_events=events),
    )
    return [what for wrong, what in _connector_faults(config) if wrong]


@pytest.mark.parametrize("events", [None, False, True])
def test_an_engine_without_a_connector_may_have_events(events: bool | None) -> None:
    assert faults(None, events=events) == []


@pytest.mark.parametrize("events", [None, False])
def test_vllms_own_offloading_keys_by_block_hashes(events: bool | None) -> None:
    assert faults("OffloadingConnector", events=events) == []


@pytest.mark.parametrize("name", ["LMCacheConnectorV1", "NixlConnector", "MultiConnector"])
def test_other_connectors_are_refused_by_name(name: str) -> None:
    """Whose keys are those of the tokens, for all we know: spans would be mixed up."""
    assert faults(name) == [f"the KV connector {name}"]


def test_events_of_offloaded_blocks_are_refused() -> None:
    assert faults("OffloadingConnector", events=True) == ["KV cache events of offloaded blocks"]


def test_offloading_as_vllm_configures_it_is_what_we_look_at() -> None:
    """`kv_offloading_size` alone ends in the one connector that is allowed."""
    from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig

    config = VllmConfig()
    config.cache_config.kv_offloading_size = 1.0
    config._post_init_kv_transfer_config()
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=False)
    assert isinstance(config.kv_transfer_config, KVTransferConfig)
    assert _connector_faults(config) == [
        (False, "the KV connector OffloadingConnector"),
        (False, "KV cache events of offloaded blocks"),
    ]


def vllm_config(platform: str, cache_dtype: str) -> Any:
    parts = enable._PARTS[platform]
    return SimpleNamespace(
        additional_config={"minipic": SpanConfig(ssep=3, pdep=4, pad=5, block_size=16).to_dict()},
        scheduler_config=SimpleNamespace(scheduler_cls=parts.scheduler),
        parallel_config=SimpleNamespace(
            worker_cls=parts.worker,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            use_ubatching=False,
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=True,
            block_size=16,
            kv_sharing_fast_prefill=False,
            cache_dtype=cache_dtype,
        ),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        speculative_config=None,
        kv_transfer_config=None,
        kv_events_config=None,
        model_config=SimpleNamespace(
            model="model",
            is_encoder_decoder=False,
            uses_mrope=False,
            use_mla=False,
            runner_type="generate",
        ),
    )


def cache_dtypes() -> list[str]:
    from vllm.config.cache import CacheDType

    return list(get_args(CacheDType))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("cache_dtype", cache_dtypes())
def test_caches_that_are_read_and_caches_that_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, platform: str, cache_dtype: str
) -> None:
    monkeypatch.setattr(enable, "_platform", lambda: platform)
    config = vllm_config(platform, cache_dtype)
    good = {"auto", "float16", "bfloat16"} | ({"fp8", "fp8_e4m3"} if platform == "cuda" else set())
    if cache_dtype in good:
        assert enable.check_config(config).block_size == 16
        return
    with pytest.raises(ConfigurationError, match=f"a {cache_dtype} KV cache"):
        enable.check_config(config)
