"""Attention of dependent tokens, one layer: our kernels beside vLLM's FlashAttention 3.

    python -m benchmarks.kernels --json out.json        on a GPU, about three minutes
    python -m benchmarks.kernels --tune --cases decode  block sizes around the defaults
    python -m benchmarks.kernels --dry-run              every path, on a CPU, with tiny shapes

Each variant is checked against the float64 specification, then captured in a CUDA graph over
enough layers that no cache line survives in L2, and replayed; medians of the time per layer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

from benchmarks.kernel_cases import CASES, LLAMA_8B, TINY, TINY_CASES, Inputs
from minipic_backend.attention.compact import plan_compact
from minipic_backend.attention.dispatch import (
    PagedWork,
    SpanWork,
    max_compact_keys,
    plan_dependent,
    run_dependent,
)
from minipic_backend.attention.geometry import Geometry, choose_geometry
from minipic_backend.attention.naive import naive_span_attention, naive_varlen_attention
from minipic_backend.attention.sequences import context_sequences
from minipic_backend.attention.work import WorkPlan, plan_work

Runner = Callable[[int, torch.Tensor], object]
TOLERANCE = 1e-2  # |out - reference| / |reference|, bfloat16


def stock_attention() -> Any:
    """vLLM's FlashAttention 3; the naive one without a GPU."""
    if not torch.cuda.is_available():
        return naive_varlen_attention
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return partial(flash_attn_varlen_func, fa_version=3)


def variants(inputs: Inputs, attend: Any) -> Iterator[tuple[str, str, Runner]]:
    """Name, what it must equal ("plain" or a key encoding), and what computes layer i into out."""
    shape, table = inputs.shape, inputs.block_table
    unrotated = replace(shape, unrotated=True)
    whole = context_sequences(inputs.plain, table, shape.block_size)

    def stock(layer: int, out: torch.Tensor) -> object:
        key, value = inputs.layer(layer)
        return attend(
            q=inputs.query, k=key, v=value, cu_seqlens_q=whole.cu_seqlens_q,
            max_seqlen_q=whole.max_seqlen_q, seqused_k=whole.seqused_k,
            max_seqlen_k=whole.max_seqlen_k, block_table=whole.block_table,
            softmax_scale=inputs.scale, causal=True, softcap=0.0, out=out,
        )  # fmt: skip

    def planned(work: SpanWork) -> Runner:
        def run(layer: int, out: torch.Tensor) -> object:
            key, value = inputs.layer(layer)
            return run_dependent(
                work, inputs.query, key, value, inputs.rotary, out, scale=inputs.scale,
                attend=attend,
            )  # fmt: skip

        return run

    compact = SpanWork((), plan_compact(inputs.runs, table, max_compact_keys(shape)), False)
    yield "stock", "plain", stock
    yield "paged, one segment", "plain", planned(plan_dependent(inputs.plain, table, shape))
    yield "span_local", "span_local", planned(plan_dependent(inputs.runs, table, shape))
    yield "compact", "span_local", planned(compact)
    yield "unrotated", "unrotated", planned(plan_dependent(inputs.runs, table, unrotated))
    chosen = plan_dependent(inputs.runs, table, shape, max_keys=max_compact_keys(shape))
    yield "chosen by the rule", "span_local", planned(chosen)


def tuned(inputs: Inputs, encoding: str) -> Iterator[tuple[str, str, Runner]]:
    """The paged kernel with other block sizes; what does not fit the GPU is passed over."""
    shape = replace(inputs.shape, unrotated=encoding == "unrotated")
    block_m = choose_geometry(shape, inputs.case.num_queries).block_m
    num_sms = torch.cuda.get_device_properties(inputs.device).multi_processor_count
    sizes = {16: (16,), 32: (16, 32, 64), 64: (64, 128), 128: (64, 128)}[block_m]
    for m in sizes:
        for n, warps, stages, per_sm in (
            (32, 4, 4, 2), (32, 4, 4, 3), (64, 4, 2, 2), (64, 4, 3, 2), (64, 4, 4, 2),
            (64, 8, 3, 2), (128, 4, 2, 2), (128, 4, 3, 1), (64, 8, 2, 1), (64, 8, 3, 1),
            (128, 8, 2, 1),
        ):  # fmt: skip
            if (m == 128) != (warps == 8 and per_sm == 1) or (m == 64 and n == 128):
                continue
            geometry = Geometry(m, n, warps, stages)
            workers = max(1, num_sms * per_sm // shape.num_kv_heads)
            (part,) = plan_dependent(inputs.runs, inputs.block_table, shape).paged
            rows, block_q = part.rows, m // shape.group
            plan = WorkPlan.allocate(
                rows.num_rows, rows.num_tokens, workers, block_q, n, device=inputs.device
            )
            plan_work(plan, rows, part.segments)
            work = SpanWork((PagedWork(rows, part.segments, plan, geometry),), (), shape.unrotated)

            def run(layer: int, out: torch.Tensor, work: SpanWork = work) -> object:
                key, value = inputs.layer(layer)
                return run_dependent(
                    work, inputs.query, key, value, inputs.rotary, out, scale=inputs.scale
                )

            yield f"{encoding} m{m} n{n} w{warps} s{stages} x{per_sm}", encoding, run


def relative_error(inputs: Inputs, kind: str, run: Runner) -> float:
    """Of a few queries of the first and the last request."""
    out = torch.full_like(inputs.query, torch.nan)
    run(0, out)
    count = inputs.case.num_queries
    worst = 0.0
    for request in {0, inputs.case.num_requests - 1}:
        for i in {0, count // 2, count - 1}:
            token = inputs.num_tokens - count + i
            key, value = inputs.request(request, 0, token + 1)
            row = request * count + i
            expected = naive_span_attention(
                inputs.query[row : row + 1].double(), key, value,
                None if kind == "plain" else inputs.table, token,
                encoding="unrotated" if kind == "unrotated" else "span_local",
                rotary=inputs.rotary, scale=inputs.scale,
            )[0]  # fmt: skip
            error = float((out[row].double() - expected).norm() / expected.norm())
            worst = max(worst, error) if error == error else float("inf")
    return worst


def microseconds(inputs: Inputs, run: Runner, seconds: float) -> dict[str, float]:
    """Median, 10th and 90th percentile of the time per layer."""
    out = torch.empty_like(inputs.query)
    num_layers = max(len(inputs.caches), 4)

    def layers() -> None:
        for layer in range(num_layers):
            run(layer, out)

    times: list[float] = []
    deadline = time.monotonic() + seconds
    if inputs.device == "cpu":
        begin = time.perf_counter()
        run(0, out)
        times.append(1e6 * (time.perf_counter() - begin))
    else:
        layers()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        while len(times) < 20 or (time.monotonic() < deadline and len(times) < 500):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / num_layers)
    times.sort()
    return {
        "median_us": statistics.median(times),
        "p10_us": times[len(times) // 10],
        "p90_us": times[9 * len(times) // 10],
    }


def planning_microseconds(inputs: Inputs) -> float:
    """Planning a step from scratch, once for all layers: host and device, best of five."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        max_keys = max_compact_keys(inputs.shape)
        plan_dependent(inputs.runs, inputs.block_table, inputs.shape, max_keys=max_keys)
        if inputs.device == "cuda":
            torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - begin))
    return min(times)


def ceilings(device: str) -> dict[str, float]:
    """Bytes per second of a copy and operations per second of a bfloat16 product, measured."""
    if device == "cpu":
        return {"bytes_per_second": 1e10, "flops_per_second": 1e10}
    source = torch.randn(2**30, device=device)
    target = torch.empty_like(source)
    a, b = torch.randn(2, 8192, 8192, device=device, dtype=torch.bfloat16).unbind(0)

    def best(function: Callable[[], object]) -> float:
        times = []
        for _ in range(8):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            times.append(1e-3 * begin.elapsed_time(end))
        return statistics.median(times[2:])

    return {
        "bytes_per_second": 2 * source.nbytes / best(lambda: target.copy_(source)),
        "flops_per_second": 2 * 8192**3 / best(lambda: a @ b),
    }


def environment() -> dict[str, str]:
    import triton

    values = {"python": platform.python_version(), "torch": torch.__version__}
    values["triton"] = triton.__version__
    if torch.cuda.is_available():
        import vllm

        values["device"] = torch.cuda.get_device_name()
        values["vllm"] = vllm.__version__
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--cases", default="", help="only cases whose name has this in it")
    parser.add_argument("--tune", action="store_true", help="try block sizes of the paged kernels")
    parser.add_argument("--seconds", type=float, default=0.7, help="of measuring, per figure")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, interpreted")
    arguments = parser.parse_args()
    device = "cpu" if arguments.dry_run else "cuda"
    shape, cases = (TINY, TINY_CASES) if arguments.dry_run else (LLAMA_8B, CASES)
    dtype = torch.float32 if arguments.dry_run else torch.bfloat16
    attend = naive_varlen_attention if arguments.dry_run else stock_attention()
    ceiling = ceilings(device)
    report: dict[str, Any] = {**environment(), **ceiling, "shape": repr(shape), "cases": []}
    print(json.dumps({k: v for k, v in report.items() if k != "cases"}))
    failures = 0
    for case in (c for c in cases if arguments.cases in c.name):
        inputs = Inputs(case, shape, device, 0 if arguments.dry_run else 256 << 20, dtype)
        floor = max(
            inputs.kv_bytes / ceiling["bytes_per_second"],
            inputs.flops / ceiling["flops_per_second"],
        )
        result: dict[str, Any] = {"case": repr(case), "floor_us": 1e6 * floor, "variants": {}}
        if not arguments.tune:
            result["plan_us"] = planning_microseconds(inputs)
        print(f"\n{case.name}: floor {1e6 * floor:.0f} us, plan {result.get('plan_us', 0):.0f} us")
        candidates = [variants(inputs, attend)]
        if arguments.tune:
            candidates = [tuned(inputs, encoding) for encoding in ("span_local", "unrotated")]
        for name, kind, run in (x for group in candidates for x in group):
            try:
                error = relative_error(inputs, kind, run)
                figures = microseconds(inputs, run, arguments.seconds)
            except Exception as problem:  # a tile too large for this GPU, while tuning
                if not arguments.tune:
                    raise
                print(f"  {name:32} {type(problem).__name__}")
                continue
            failures += error > TOLERANCE
            result["variants"][name] = {**figures, "relative_error": error}
            stock = result["variants"].get("stock", figures)["median_us"]
            print(
                f"  {name:32} {figures['median_us']:9.1f} us  {figures['median_us'] / stock:5.2f}"
                f" of stock  error {error:.1e}{'  WRONG' if error > TOLERANCE else ''}"
            )
        report["cases"].append(result)
        del inputs
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
