"""Prometheus figures of spans, beside vLLM's own.

The scheduler counts, in the engine's process; vLLM carries its `SchedulerStats` to the server,
where a logger of ours takes our part out before vLLM's own loggers look. Only where vLLM's
statistics are on.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from typing import Any

from prometheus_client import Counter, Histogram

from minipic_backend.config import CONFIG_KEY
from minipic_backend.spans.figures import SpanFigures

__all__ = ["SpanCounts", "SpanStatLogger", "span_stat_logger"]

_LABELS = ("model_name", "engine")
_WAIT_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_MARK = "minipic:"
_SOURCES = ("hit", "waited", "computed")


class SpanCounts:
    """What happened since the last time that somebody asked."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def admitted(self, figures: SpanFigures) -> None:
        """A request was admitted."""
        for source in _SOURCES:
            self._add(source, getattr(figures, f"{source}_tokens"))
        if figures.wait_s:
            wait_us = round(1e6 * figures.wait_s)
            bucket = bisect_left(_WAIT_BUCKETS, wait_us / 1e6)
            self._add(f"waits:{bucket}", 1)
            self._add(f"wait_us:{bucket}", wait_us)

    def add_jobs(self, num_jobs: int, num_tokens: int) -> None:
        """Jobs were made, for so many tokens in blocks that were missing."""
        self._add("jobs", num_jobs)
        self._add("job_tokens", num_tokens)

    def take_into(self, stats: Any) -> None:
        """Puts the counts into vLLM's statistics, in the one field that takes names with numbers,
        and starts again from 0."""
        stats.num_kv_fetch_reqs_by_stage.update(self._counts)
        self._counts = {}

    def _add(self, name: str, count: int) -> None:
        if count:
            self._counts[_MARK + name] = self._counts.get(_MARK + name, 0) + count


class SpanStatLogger:
    """One of vLLM's stat loggers, to come first.

    Args:
        model_name: as it is served.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._tokens, self._jobs, self._job_tokens, self._wait = _collectors()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Takes our counts out of `scheduler_stats`, whose other readers must not see them."""
        if scheduler_stats is None:
            return
        stages = scheduler_stats.num_kv_fetch_reqs_by_stage
        labels = (self._model_name, str(engine_idx))
        names = [name for name in stages if name.startswith(_MARK)]
        counts = {name.removeprefix(_MARK): stages.pop(name) for name in names}
        for kind, count in counts.items():
            if kind in _SOURCES:
                self._tokens.labels(*labels, kind).inc(count)
            elif kind == "jobs":
                self._jobs.labels(*labels).inc(count)
            elif kind == "job_tokens":
                self._job_tokens.labels(*labels).inc(count)
            elif kind.startswith("waits:"):
                # Their mean stands for those of a bucket: same buckets, same count, same sum.
                wait_us = counts.get(kind.replace("waits", "wait_us"), 0)
                for _ in range(count):
                    self._wait.labels(*labels).observe(wait_us / count / 1e6)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def log(self) -> None:
        """Nothing to say."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Does not matter here."""

    def record_admission_rejection(self, reason: str) -> None:
        """Does not matter here."""


def span_stat_logger(vllm_config: Any) -> SpanStatLogger | None:
    """A logger for an engine with spans; None for any other."""
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or CONFIG_KEY not in additional:
        return None
    return SpanStatLogger(str(vllm_config.model_config.served_model_name))


@cache
def _collectors() -> tuple[Counter, Counter, Counter, Histogram]:
    """Registered once a process, however many engines it serves."""
    return (
        Counter(
            "minipic:span_tokens",
            "Tokens of documents: hit in the cache, waited for while computed for another "
            "request, or computed.",
            (*_LABELS, "source"),
        ),
        Counter("minipic:span_jobs", "Internal requests for missing documents.", _LABELS),
        Counter("minipic:span_job_tokens", "Tokens of missing blocks that they compute.", _LABELS),
        Histogram(
            "minipic:span_wait_seconds",
            "From a request's turn to its admission, where documents were missing.",
            _LABELS,
            buckets=_WAIT_BUCKETS,
        ),
    )
