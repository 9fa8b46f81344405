"""Spans that left the cache come back from memory behind it, by jobs, wherever they stand.

The scheduler alone, with a connector of our own; `tests/gpu/test_offload.py` has vLLM's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from step_rig import BLOCK_SIZE, StepRig, prompt

from minipic_backend.plugin import enable
from minipic_backend.plugin.span_jobs import JOB_PREFIX


def host_rig(folder: Path, **settings: Any) -> StepRig:
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(
        kv_connector="HostConnector", kv_connector_module_path="host_connector", kv_role="kv_both"
    )
    return StepRig(folder, kv_transfer_config=config, **settings)


@pytest.fixture(autouse=True)
def own_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours keys by block hashes too, but it is not among those that users may name."""
    monkeypatch.setattr("minipic_backend.plugin.enable._CONNECTORS", ("HostConnector",))


@pytest.fixture(autouse=True)
def allow_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines take vLLM's own connectors only; this one stands in for them."""
    monkeypatch.setattr(enable, "_CONNECTORS", (*enable._CONNECTORS, "HostConnector"))


@pytest.fixture(params=[0, 1], ids=["in step", "ahead"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StepRig]:
    rig = host_rig(tmp_path, ahead=request.param)
    yield rig
    rig.finish()
    rig.assert_idle()


def forget(rig: StepRig) -> None:
    """Empties the cache, not the memory behind it."""
    rig.reset()
    rig.scheduler.connector.num_loaded = 0


def test_evicted_documents_are_loaded_in_another_order(rig: StepRig) -> None:
    rig.run(prompt(1, 2, 3))
    forget(rig)
    served = rig.run(prompt(3, 1, 2, question=1))
    assert rig.scheduler.connector.num_loaded == 2 + 3 * 3
    assert served.num_cached == 2 * BLOCK_SIZE + 3 * 3 * BLOCK_SIZE
    assert served.figures is not None
    assert served.figures["hit_tokens"] == 3 * 3 * BLOCK_SIZE
    # Of each document the last token is computed again: a request must have one to compute.
    assert max(rig.computed.values()) == 1


def test_documents_behind_a_new_text_are_loaded(rig: StepRig) -> None:
    rig.run(prompt(1, 2, text=50))
    forget(rig)
    served = rig.run(prompt(2, 1, text=51))
    assert rig.scheduler.connector.num_loaded == 2 + 2 * 3
    assert served.num_cached == 2 * BLOCK_SIZE + 2 * 3 * BLOCK_SIZE
    rig.run(prompt(3, text=51))
    forget(rig)
    served = rig.run(prompt(1, 3, text=51))
    assert served.figures is not None
    assert served.figures["hit_tokens"] == 2 * 3 * BLOCK_SIZE


def test_documents_of_all_three_kinds(rig: StepRig) -> None:
    rig.run(prompt(1, 2))
    forget(rig)
    rig.run(prompt(2, question=1))  # in the cache again
    rig.scheduler.connector.num_loaded = 0
    served = rig.run(prompt(9, 2, 1, question=2))
    assert rig.scheduler.connector.num_loaded == 3
    assert served.figures is not None
    assert served.figures["hit_tokens"] == 2 * 3 * BLOCK_SIZE
    assert served.figures["computed_tokens"] == 3 * BLOCK_SIZE


def test_jobs_store_whole_blocks_and_end_unseen(rig: StepRig) -> None:
    rig.run(prompt(1))
    rig.run(prompt(2, 1))
    hashes = [bytes(block) for block in rig.hashes(prompt(2))[:5]]
    assert set(hashes) <= rig.scheduler.connector.on_host
    assert any(name.startswith(JOB_PREFIX) for step in rig.steps for name in step)


def test_statistics_count_no_job_that_is_about_to_end(tmp_path: Path) -> None:
    rig = host_rig(tmp_path, ahead=1, log_stats=True)
    rig.run(prompt(1))
    rig.add(prompt(2, 1))
    num_internal = 0
    while rig.scheduler.has_requests() or rig.pending:
        rig.advance()
        stats = rig.scheduler.make_stats()
        found = (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_skipped_waiting_reqs)
        assert min(found) >= 0
        assert sum(found) <= 1
        num_internal += sum(r.request_id.startswith(JOB_PREFIX) for r in rig.scheduler.running)
    assert num_internal > 0


@pytest.mark.parametrize("seed", range(4))
def test_nothing_leaks_and_nothing_hangs(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    rig = host_rig(
        tmp_path,
        ahead=seed % 2,
        num_blocks=rng.choice([26, 34]),
        max_num_seqs=rng.choice([3, 16]),
        max_num_batched_tokens=rng.choice([64, 512]),
        max_model_len=16 * 24,
    )
    served: list[Any] = []
    while len(served) < 48 or not all(one.finished for one in served):
        while len(served) < 48 and rng.random() < 0.4:
            documents = rng.sample(range(12), rng.randint(1, 4))
            text = rng.choice([None, 50, 51])
            asked = prompt(*documents, question=len(served), text=text)
            served.append(rig.add(asked, num_tokens=2))
        running = [one for one in served if not one.finished]
        if running and rng.random() < 0.05:
            rig.abort(rng.choice(running))
        if rig.scheduler.has_requests() or rig.pending:
            rig.advance()
        assert rig.num_steps < 5000
    rig.finish()
    rig.assert_idle()
    assert rig.scheduler.connector.num_loaded > 0
