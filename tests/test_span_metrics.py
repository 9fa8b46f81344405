"""Prometheus figures of spans: from the scheduler's statistics to the server's registry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY

from minipic_backend.config import CONFIG_KEY
from minipic_backend.plugin import seams
from minipic_backend.plugin.metrics import SpanCounts, SpanStatLogger, span_stat_logger
from minipic_backend.spans.figures import SpanFigures


def value(name: str, **labels: str) -> float:
    """A figure of the engine under test."""
    found = REGISTRY.get_sample_value(name, {"model_name": "m", "engine": "0", **labels})
    return 0.0 if found is None else found


def statistics(counts: SpanCounts) -> Any:
    from vllm.v1.metrics.stats import SchedulerStats

    stats = SchedulerStats(num_kv_fetch_reqs_by_stage={"in_progress": 2})
    counts.take_into(stats)
    return stats


def test_counts_reach_the_registry_and_nothing_is_left_for_other_loggers() -> None:
    counts = SpanCounts()
    counts.admitted(SpanFigures(96, 48, 0, 0.02))
    counts.admitted(SpanFigures(0, 0, 160, 0.0))
    counts.add_jobs(3, 144)
    stats = statistics(counts)
    before = {
        source: value("minipic:span_tokens_total", source=source)
        for source in ("hit", "waited", "computed")
    }
    jobs = value("minipic:span_jobs_total")
    waits = value("minipic:span_wait_seconds_count")
    logger = SpanStatLogger("m")
    logger.record(stats, None)
    assert stats.num_kv_fetch_reqs_by_stage == {"in_progress": 2}
    after = {source: value("minipic:span_tokens_total", source=source) for source in before}
    assert {source: after[source] - before[source] for source in before} == {
        "hit": 96,
        "waited": 48,
        "computed": 160,
    }
    assert value("minipic:span_jobs_total") - jobs == 3
    assert value("minipic:span_wait_seconds_count") - waits == 1
    assert value("minipic:span_wait_seconds_bucket", le="0.03") >= 1
    logger.record(statistics(counts), None)  # counted once
    assert value("minipic:span_jobs_total") - jobs == 3


def test_statistics_cross_to_another_process_as_they_are() -> None:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    counts = SpanCounts()
    counts.admitted(SpanFigures(96, 48, 0, 0.02))
    sent = EngineCoreOutputs(scheduler_stats=statistics(counts))
    got = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
    assert got.scheduler_stats.num_kv_fetch_reqs_by_stage == {
        "in_progress": 2,
        "minipic:hit": 96,
        "minipic:waited": 48,
        "minipic:waits:3": 1,  # up to 0.03 s
        "minipic:wait_us:3": 20_000,
    }


def test_waits_of_many_requests_take_a_name_for_each_bucket() -> None:
    waits_s = [0.001, 0.003, 0.003002, *[0.02] * 500, 0.03, 100.0, 50.0]
    counts = SpanCounts()
    for wait_s in waits_s:
        counts.admitted(SpanFigures(0, 48, 0, wait_s))
    stats = statistics(counts)
    assert len(stats.num_kv_fetch_reqs_by_stage) <= 2 + 2 * 11
    buckets = ("0.001", "0.003", "0.01", "0.03", "0.1", "30.0", "+Inf")

    def state() -> list[float]:
        name = "minipic:span_wait_seconds"
        found = [value(f"{name}_bucket", le=le) for le in buckets]
        return [*found, value(f"{name}_count"), value(f"{name}_sum")]

    before = state()
    SpanStatLogger("m").record(stats, None)
    *in_buckets, count, total = (b - a for a, b in zip(before, state(), strict=True))
    assert in_buckets == [sum(wait_s <= float(le) for wait_s in waits_s) for le in buckets]
    assert count == len(waits_s)
    # Whole microseconds are carried.
    assert total == pytest.approx(sum(waits_s), abs=1e-6 * len(waits_s))


def test_figures_of_a_request_cross_as_well() -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    figures = SpanFigures(96, 48, 0, 0.02)
    output = EngineCoreOutput("a", [1], kv_transfer_params={CONFIG_KEY: figures.to_dict()})
    sent = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output]))
    (got,) = MsgpackDecoder(EngineCoreOutputs).decode(sent).outputs
    assert SpanFigures.from_dict(got.kv_transfer_params[CONFIG_KEY]) == figures


def config(additional: dict[str, Any]) -> Any:
    model = SimpleNamespace(served_model_name="m")
    return SimpleNamespace(additional_config=additional, model_config=model)


def test_only_an_engine_with_spans_has_the_logger() -> None:
    assert span_stat_logger(config({})) is None
    assert span_stat_logger(config({CONFIG_KEY: {}})) is not None


def test_it_comes_before_the_loggers_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.metrics.loggers import StatLoggerManager

    def init(self: Any, vllm_config: Any) -> None:
        self.stat_loggers = ["vLLM's"]

    monkeypatch.setattr(StatLoggerManager, "__init__", init)
    seams.add_stat_logger(span_stat_logger)
    seams.add_stat_logger(span_stat_logger)
    first, *others = StatLoggerManager(config({CONFIG_KEY: {}})).stat_loggers
    assert isinstance(first, SpanStatLogger)
    assert others == ["vLLM's"]
    assert StatLoggerManager(config({})).stat_loggers == ["vLLM's"]
