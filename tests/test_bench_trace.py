"""`minipic bench throughput --trace`: the workload, the settings, the table; no engine."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from minipic_backend.bench import retune as retuning
from minipic_backend.bench.engines import MARKERS, Served
from minipic_backend.bench.measure_trace import (
    TraceCase,
    format_trace_table,
    measure_trace,
    with_ideal,
)
from minipic_backend.bench.prompts import RandomPrompts
from minipic_backend.bench.trace import Trace, draw_workload, random_trace, read_trace
from minipic_backend.errors import ConfigurationError

TRACE = random_trace(200)


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def test_a_trace_is_read_as_tokens_that_are_no_markers(tmp_path: Path) -> None:
    lines = [{"id": 7, "title": "Rome", "text": "Rome is a city."}, {"text": "Rome is old."}]
    trace = read_trace(write(tmp_path / "passages.jsonl", lines))
    assert [len(passage) for passage in trace.passages] == [6, 4]
    assert trace.passages[0][1:4] == (
        *trace.passages[0][:1],
        *trace.passages[1][1:2],
        trace.passages[0][3],
    )
    assert not {*MARKERS.values()} & {token for passage in trace.passages for token in passage}


@pytest.mark.parametrize("line", [{"title": "no text"}, ["a list"], 3])
def test_a_line_that_is_no_passage_is_named(tmp_path: Path, line: Any) -> None:
    path = write(tmp_path / "passages.jsonl", [{"text": "fine"}, line])
    with pytest.raises(ConfigurationError, match="line 2"):
        read_trace(path)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nothing"):
        read_trace(tmp_path / "nothing.jsonl")


@pytest.mark.parametrize(("samples", "reuse", "distinct"), [(30, None, 200), (30, 3.0, 100)])
def test_every_passage_is_used_and_none_twice_in_a_sample(
    samples: int, reuse: float | None, distinct: int
) -> None:
    workload = draw_workload(TRACE, samples, reuse)
    counts = Counter(passage for sample in workload.samples for passage in sample)
    assert len(counts) == distinct
    assert all(len(set(sample)) == 10 for sample in workload.samples)
    assert len(workload.samples) == samples
    assert len(set(workload.questions)) == samples


def test_what_a_cache_without_limit_must_compute() -> None:
    trace = Trace("small", tuple((10,) * 20 for _ in range(10)))
    workload = draw_workload(trace, 5, None)
    assert workload.reuse == 5
    assert workload.num_tokens == 5 * (60 + 10 * 20 + 48)
    assert workload.num_needed_tokens == 60 + 10 * 20 + 5 * 48


def test_too_little_of_a_trace_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="reuse"):
        draw_workload(TRACE, 30, 1.2)
    with pytest.raises(ConfigurationError, match="10 passages"):
        draw_workload(Trace("tiny", TRACE.passages[:9]), 30, None)


class FakeSession:
    """Serves a prompt in no time; remembers what it was asked."""

    block_size = 16

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.has_spans = variant != "stock"
        self.settings: list[dict[str, Any]] = []
        self.prompts: list[list[list[int]]] = []

    def retune(self, settings: dict[str, Any]) -> int:
        self.settings.append(settings)
        return 1000

    def serve(self, prompts: list[list[int]]) -> list[Served]:
        self.prompts.append(prompts)
        return [Served(0.0, [1.0], num_cached_tokens=5) for _ in prompts]


CASES = [
    TraceCase("interleaved", 64, None),
    TraceCase("in_place", 256, 0.1),
]


def test_each_case_is_set_and_served_with_spans() -> None:
    session: Any = FakeSession("span_local")
    workload = draw_workload(TRACE, 30, None)
    rows = list(measure_trace(session, workload, CASES, runs=2))
    assert [one["policy"] for one in session.settings] == ["interleaved"] * 2 + ["in_place"] * 2
    assert [one["max_num_seqs"] for one in session.settings] == [64, 64, 256, 256]
    source = RandomPrompts(0, 16)
    blocks = sum(len(source.as_span(passage)) // 16 for passage in TRACE.passages)
    assert session.settings[0]["cache_blocks"] is None
    assert session.settings[2]["cache_blocks"] == pytest.approx(blocks / 10, rel=0.05)
    served = session.prompts[-1]
    assert len(served) == 30
    assert all(prompt.count(MARKERS["ssep"]) == 10 for prompt in served)
    assert [len(row.values) for row in rows] == [2, 2]
    assert rows[0].details["cached_tokens"] == 150


def test_an_engine_without_spans_is_measured_once_with_plain_prompts() -> None:
    session: Any = FakeSession("stock")
    (row,) = measure_trace(session, draw_workload(TRACE, 30, None), CASES, runs=1)
    assert session.settings == [{"max_num_seqs": 256, "cache_blocks": None}]
    assert not {*MARKERS.values()} & {token for one in session.prompts[-1] for token in one}
    assert row.details["policy"] == ""


def test_the_ideal_is_the_speed_of_stock_on_the_tokens_that_are_needed() -> None:
    """Its speed is that of what it computes: five tokens of each prompt come from its cache."""
    workload = draw_workload(TRACE, 30, None)
    sessions: list[Any] = [FakeSession("stock"), FakeSession("span_local")]
    rows = [row for session in sessions for row in measure_trace(session, workload, CASES, runs=1)]
    rows = with_ideal(rows, "stock")
    stock = rows[0].median
    for row in rows:
        ideal = stock * (workload.num_tokens - 5 * 30) / workload.num_needed_tokens
        assert row.details["ideal"] == pytest.approx(ideal)
        assert row.details["of_ideal"] == pytest.approx(row.median / ideal)
        assert row.details["of_stock"] == pytest.approx(row.median / stock)
    table = format_trace_table(rows).splitlines()
    assert table[0].split() == [
        *("engine", "policy", "max_num_seqs", "cache", "samples/s", "/", "stock", "/", "ideal"),
    ]
    assert table[1].split()[:4] == ["stock", "-", "256", "all"]
    assert table[3].split()[:4] == ["span_local", "in_place", "256", "0.1"]
    assert with_ideal(rows[1:], None) == rows[1:]


class FakePool:
    def __init__(self) -> None:
        self.free = list(range(100))

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def free_blocks(self, blocks: list[int]) -> None:
        self.free += blocks


class FakeEngineCore:
    """Calls a function for its worker, as vLLM's does."""

    def __init__(self) -> None:
        self.model_executor = object()
        self.pool = FakePool()
        self.scheduler = SimpleNamespace(
            max_num_running_reqs=8,
            max_num_active_reqs=8,
            block_size=16,
            planner=SimpleNamespace(policy="interleaved"),
            kv_cache_manager=SimpleNamespace(block_pool=self.pool),
            reset_prefix_cache=lambda: len(self.pool.free) == 100,
        )

    def collective_rpc(self, function: Any, args: tuple[Any, ...]) -> Any:
        return function(object(), *args)


def test_retune_finds_the_scheduler_and_changes_it() -> None:
    core = FakeEngineCore()
    settings = {"max_num_seqs": 4, "policy": "in_place", "cache_blocks": 30}
    assert core.collective_rpc(retuning.retune, (settings,)) == 30 * 16
    assert core.scheduler.max_num_running_reqs == core.scheduler.max_num_active_reqs == 4
    assert core.scheduler.planner.policy == "in_place"
    assert core.collective_rpc(retuning.retune, ({"cache_blocks": None},)) == 100 * 16
    core.pool.free.pop()  # a request is running
    with pytest.raises(RuntimeError, match="idle"):
        core.collective_rpc(retuning.retune, ({"cache_blocks": None},))


def test_retune_elsewhere_says_so() -> None:
    with pytest.raises(RuntimeError, match="EngineCore"):
        retuning.retune(object(), {})
