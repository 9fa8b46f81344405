"""The table of docs/scheduling.md: RAG traffic on stock vLLM and on ours, policy by policy.

    python -m benchmarks.trace_table [--trace PASSAGES.jsonl] [--engines stock,…] --json OUT

Each engine starts once. Ours is measured on 1,000 samples with every policy at 64, 1,024 and 2,048
rows, and with a cache of a tenth of all passages; then on 4,000 samples, every passage used 6.54
times. Stock vLLM gets the 1,000 samples: it reuses none of their passages, so its tokens per second
are those of both. Rows that OUT already has are kept, so that engines may be measured in several
calls on one machine. Takes about ten minutes on an H200 (8B shape).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minipic_backend.bench.engines import Session, open_session
from minipic_backend.bench.measure import Row
from minipic_backend.bench.measure_trace import (
    TraceCase,
    format_trace_table,
    measure_trace,
    with_ideal,
)
from minipic_backend.bench.report import environment, write_json
from minipic_backend.bench.retune import ALLOW
from minipic_backend.bench.trace import Trace, draw_workload, random_trace, read_trace
from minipic_backend.config import Policy

ROWS = (64, 1024, 2048)
POLICIES: tuple[Policy, ...] = ("interleaved", "batched", "in_place")
CASES = [
    *(TraceCase(policy, rows, None) for policy in POLICIES for rows in ROWS),
    TraceCase("interleaved", 1024, 0.1),
    TraceCase("in_place", 1024, 0.1),
]
MUCH_REUSE = [TraceCase("interleaved", 1024, share) for share in (None, 0.1)]
SHAPE: dict[str, Any] = {
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": max(ROWS),
    "gpu_memory_utilization": 0.95,
    "distributed_executor_backend": "uni",
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
}


def figures(session: Session, trace: Trace, samples: int, more: int) -> Iterator[Row]:
    yield from measure_trace(session, draw_workload(trace, samples, None), CASES, runs=1)
    if session.has_spans:
        workload = draw_workload(trace, more, 6.54)
        yield from measure_trace(session, workload, MUCH_REUSE, runs=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trace", type=Path, help="JSONL; default: 6,119 passages of random tokens"
    )
    parser.add_argument("--engines", default="stock,stock-triton,span_local")
    parser.add_argument("--model", default="shape:llama-3-8b")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--more-samples", type=int, default=4000)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ |= ALLOW
    trace = read_trace(options.trace) if options.trace else random_trace(6119)
    rows: list[Row] = []
    if options.json.exists():
        for row in json.loads(options.json.read_text(encoding="utf-8"))["rows"]:
            row.pop("median")
            rows.append(Row(**{**row, "values": tuple(row["values"])}))
    about = environment(options.model, SHAPE)
    for engine in options.engines.split(","):
        with open_session(engine, options.model, SHAPE) as session:
            for row in figures(session, trace, options.samples, options.more_samples):
                rows = with_ideal([*rows, row], "stock")
                print(f"{row.variant} {row.case}: {row.median:.4g} {row.unit}", flush=True)
                write_json(options.json, rows, about)
    print(format_trace_table(rows))


if __name__ == "__main__":
    main()
