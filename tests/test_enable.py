"""What a configuration of vLLM's may not have beside spans, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

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
