"""What `minipic bench throughput|ttft|decode` measures on engines, known before they start."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from minipic_backend.bench.engines import VARIANTS
from minipic_backend.bench.measure import (
    Row,
    count_decode,
    count_throughput,
    count_ttft,
    measure_capacity,
    measure_decode,
    measure_throughput,
    measure_ttft,
)
from minipic_backend.bench.measure_trace import TraceCase, count_trace, measure_trace
from minipic_backend.bench.options import decode_cases
from minipic_backend.bench.trace import Trace, draw_workload, random_trace, read_trace

__all__ = ["Measurement", "plan"]

_STOCK_SAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Measurement:
    """One call of a `measure_…`.

    Args:
        bench: its name.
        num_prompts: that it serves, those that warm up included.
        measure: the call; with the session of each engine.
    """

    bench: str
    num_prompts: int
    measure: Callable[..., Iterable[Row]]


def plan(
    options: argparse.Namespace, variants: Sequence[str], *, on_gpu: bool
) -> list[tuple[Sequence[str], list[Measurement]]]:
    """(engines that are open at once, their measurements): one engine after another, or all.

    Raises:
        ConfigurationError: a trace that cannot be read, or is too short.
    """
    trace = None
    if options.trace:
        trace = random_trace(6119) if options.trace == "random" else read_trace(Path(options.trace))
    groups = [variants] if options.together else [[variant] for variant in variants]
    return [(group, list(_measurements(options, trace, group, on_gpu))) for group in groups]


def _measurements(
    options: argparse.Namespace, trace: Trace | None, variants: Sequence[str], on_gpu: bool
) -> Iterator[Measurement]:
    have_spans = ["spans" in VARIANTS[variant] for variant in variants]
    yield Measurement("capacity", 0, lambda *sessions: map(measure_capacity, sessions))
    for bench in options.bench:  # in the order given
        if bench == "throughput":
            samples = options.samples or [1000 if on_gpu else 10]
            if trace:
                yield from _trace(options, trace, samples, have_spans[0])
            else:
                yield _throughput(samples[0], options.runs, len(variants))
        elif bench == "ttft":
            size = options.document_tokens or (1000 if on_gpu else 100)
            for count in options.documents or ([10, 30, 100] if on_gpu else [4, 10]):
                yield _ttft(count, size, options.runs, have_spans)
        else:
            usual = "1x8192,32x8192,64x2048,1x10000:10" if on_gpu else "1x512,1x512:4"
            for case in options.decode or decode_cases(usual):
                yield _decode(case, options.runs, len(variants))


def _throughput(samples: int, runs: int, engines: int) -> Measurement:
    measure = partial(measure_throughput, samples=samples, runs=runs)
    prompts = engines * count_throughput(samples=samples, runs=runs)
    return Measurement("throughput", prompts, measure)


def _ttft(documents: int, document_tokens: int, runs: int, have_spans: list[bool]) -> Measurement:
    measure = partial(measure_ttft, documents=documents, document_tokens=document_tokens, runs=runs)
    prompts = sum(count_ttft(has_spans=has_spans, runs=runs) for has_spans in have_spans)
    return Measurement("ttft", prompts, measure)


def _decode(case: tuple[int, int, int], runs: int, engines: int) -> Measurement:
    batch, context, documents = case
    measure = partial(measure_decode, batch=batch, context=context, documents=documents, runs=runs)
    prompts = engines * count_decode(batch=batch, runs=runs)
    return Measurement("decode", prompts, measure)


def _trace(
    options: argparse.Namespace, trace: Trace, samples: list[int], has_spans: bool
) -> Iterator[Measurement]:
    cases = [
        TraceCase(policy, seqs, share)
        for share in options.cache_share
        for policy in options.policy
        for seqs in options.max_num_seqs
    ]
    reuses = options.reuse
    if not has_spans:
        # It reuses nothing but a prefix: its tokens per second are what counts.
        samples, reuses = [min(samples[0], _STOCK_SAMPLES)], [None]
    if len(reuses) < len(samples):
        reuses = reuses * len(samples)
    for count, reuse in zip(samples, reuses, strict=True):
        workload = draw_workload(trace, count, reuse)
        yield Measurement(
            "throughput",
            count_trace(workload, cases, has_spans=has_spans, runs=options.runs),
            partial(measure_trace, workload=workload, cases=cases, runs=options.runs),
        )
