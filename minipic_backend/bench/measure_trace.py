"""Prefill throughput on a trace of passages: policies, rows at a time, sizes of the cache."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minipic_backend.bench.engines import Session
from minipic_backend.bench.measure import Row
from minipic_backend.bench.prompts import RandomPrompts
from minipic_backend.bench.trace import Workload, draw_workload, random_trace
from minipic_backend.config import Policy
from minipic_backend.table import format_rows

__all__ = ["TraceCase", "count_trace", "format_trace_table", "measure_trace", "with_ideal"]

_WARM_UPS = (1, 40, 40)
"""Samples together that nobody times: kernels are compiled, and chosen, when they first run."""


@dataclass(frozen=True, slots=True)
class TraceCase:
    """One setting.

    Args:
        policy: of an engine with spans.
        max_num_seqs: rows of a batch.
        cache_share: of the working set (every passage once), that the cache holds; None: all
            memory that there is.
    """

    policy: Policy
    max_num_seqs: int
    cache_share: float | None


def count_trace(
    workload: Workload, cases: Sequence[TraceCase], *, has_spans: bool, runs: int
) -> int:
    """Prompts that `measure_trace` serves."""
    measured = len(workload.samples) * (len(cases) if has_spans else 1) * runs
    return sum(_WARM_UPS) + measured


def measure_trace(
    session: Session, workload: Workload, cases: Sequence[TraceCase], *, runs: int
) -> Iterator[Row]:
    """Samples per second, one token generated for each, all submitted at once.

    An engine without spans gets ordinary prompts, once: it has no policies.
    """
    source = RandomPrompts(0, session.block_size)
    _warm_up(session, source)
    if not session.has_spans:
        cases = [replace(cases[0], max_num_seqs=max(c.max_num_seqs for c in cases))]
        cases = [replace(case, cache_share=None) for case in cases]
    prompts = list(workload.with_spans(source) if session.has_spans else workload.plain())
    blocks = -(-sum(len(source.as_span(p)) for p in workload.trace.passages) // session.block_size)
    blocks = round(blocks * workload.num_distinct / len(workload.trace.passages))
    for case in cases:
        values, cached = [], 0
        settings: dict[str, Any] = {
            "max_num_seqs": case.max_num_seqs,
            "cache_blocks": case.cache_share and round(case.cache_share * blocks),
        }
        if session.has_spans:
            settings["policy"] = case.policy
        for _ in range(runs):
            cache_tokens = session.retune(settings)
            started = time.perf_counter()
            served = session.serve(prompts)
            values.append(len(prompts) / (time.perf_counter() - started))
            cached = sum(one.num_cached_tokens for one in served)
        yield Row(
            "throughput",
            f"{len(prompts)} samples, reuse {workload.reuse:.2f}: {_name(case, session)}",
            session.variant,
            "samples/s",
            tuple(values),
            {
                "samples": len(prompts),
                "trace": workload.trace.name,
                "passages": workload.num_distinct,
                "policy": case.policy if session.has_spans else "",
                "max_num_seqs": case.max_num_seqs,
                "cache_share": case.cache_share,
                "cache_tokens": cache_tokens,
                "prompt_tokens": sum(map(len, prompts)),
                "plain_tokens": workload.num_tokens,
                "needed_tokens": workload.num_needed_tokens,
                "cached_tokens": cached,
            },
        )


def with_ideal(rows: Iterable[Row], baseline: str | None) -> list[Row]:
    """Trace rows with what a cache without limit could do at the baseline's speed:
    tokens that it computes in a second ÷ the tokens that such a cache must still compute. What the
    baseline reads from its own cache, the common prefix, it does not compute."""
    rows = list(rows)
    base = next(
        (row for row in rows if row.variant == baseline and "needed_tokens" in row.details), None
    )
    if base is None:
        return rows
    read = base.median * base.details["plain_tokens"] / base.details["samples"]
    computed = read * (1 - base.details["cached_tokens"] / base.details["plain_tokens"])
    result = []
    for row in rows:
        if "needed_tokens" in row.details:
            samples = row.details["samples"]
            stock = read * samples / row.details["plain_tokens"]
            ideal = computed * samples / row.details["needed_tokens"]
            details = {"of_stock": row.median / stock, "of_ideal": row.median / ideal}
            row = replace(row, details={**row.details, "ideal": ideal, **details})
        result.append(row)
    return result


def format_trace_table(rows: Iterable[Row]) -> str:
    """A line for each trace row, beside stock vLLM and the ideal."""
    head = ("engine", "policy", "max_num_seqs", "cache", "samples/s", "/ stock", "/ ideal")
    lines = [head]
    for row in rows:
        details = row.details
        if "needed_tokens" in details:
            share = details["cache_share"]
            lines.append(
                (
                    row.variant,
                    details["policy"] or "-",
                    str(details["max_num_seqs"]),
                    "all" if share is None else f"{share:g}",
                    f"{row.median:.4g}",
                    f"{details['of_stock']:.3f}" if "of_stock" in details else "",
                    f"{details['of_ideal']:.3f}" if "of_ideal" in details else "",
                )
            )
    return "\n".join(format_rows(lines))


def _name(case: TraceCase, session: Session) -> str:
    if not session.has_spans:
        return "stock"
    share = "all memory" if case.cache_share is None else f"cache {case.cache_share:g}"
    return f"{case.policy}, {case.max_num_seqs} seqs, {share}"


def _warm_up(session: Session, source: RandomPrompts) -> None:
    most = max(_WARM_UPS)
    other = draw_workload(random_trace(10 * most, seed=99), most, None, seed=99)
    prompts = list(other.with_spans(source) if session.has_spans else other.plain())
    for count in _WARM_UPS:
        session.serve(prompts[:count])
