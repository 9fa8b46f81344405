"""`minipic bench throughput|ttft|decode`: engines one after another, one table."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from minipic_backend.bench.engines import VARIANTS, Session, open_session
from minipic_backend.bench.measure import (
    Row,
    measure_capacity,
    measure_decode,
    measure_throughput,
    measure_ttft,
)
from minipic_backend.bench.measure_trace import (
    TraceCase,
    format_trace_table,
    measure_trace,
    with_ideal,
)
from minipic_backend.bench.options import (
    add_engine_options,
    choices,
    engine_args,
    number,
    numbers,
    positive,
)
from minipic_backend.bench.progress import say
from minipic_backend.bench.report import environment, format_table, write_json
from minipic_backend.bench.retune import ALLOW
from minipic_backend.bench.trace import draw_workload, random_trace, read_trace
from minipic_backend.config import Policy
from minipic_backend.errors import ConfigurationError, shown

__all__ = ["add_arguments", "run"]

_STOCK_SAMPLES = 1000

BENCHES = ("throughput", "ttft", "decode")
_OWN_COMMANDS = ("quality", "cost")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `minipic bench`."""
    own = " and ".join(f"`minipic bench {name}`" for name in _OWN_COMMANDS)
    parser.epilog = f"{own} have options of their own."
    parser.add_argument(
        "bench",
        nargs="+",
        type=_bench,
        metavar="BENCH",
        help=f"what to measure: {', '.join(BENCHES)}, any of them together; or alone: "
        f"{', '.join(_OWN_COMMANDS)}",
    )
    parser.add_argument(
        "--model",
        default=None,
        help="folder, hub name, or shape:NAME with random weights "
        "(default: shape:llama-3-8b on a GPU, SmolLM2 on a CPU)",
    )
    parser.add_argument(
        "--engine",
        type=choices("engine", VARIANTS),
        default=["span_local"],
        help=f"engine to measure, or several: a,b; of {', '.join(VARIANTS)}",
    )
    parser.add_argument(
        "--compare",
        type=choices("engine", VARIANTS),
        default=[],
        help="engines to compare with, e.g. stock",
    )
    parser.add_argument("--runs", type=number, default=3, help="runs of each figure")
    parser.add_argument(
        "--samples",
        type=numbers,
        default=None,
        help="prompts of `throughput`; with --trace, several: 1000,4000",
    )
    parser.add_argument(
        "--trace",
        default=None,
        help="`throughput` on samples of ten passages each: a JSONL file of passages "
        '{"title", "text"}, or `random` for 6,119 of random tokens',
    )
    parser.add_argument(
        "--reuse",
        type=positive("least"),
        default=[None],
        help="with --trace: uses of a passage, on average, for each number of samples; "
        "`least`: every passage of the trace is used",
    )
    parser.add_argument(
        "--policy",
        type=choices("policy", get_args(Policy)),
        default=["interleaved"],
        help=f"with --trace, or several: a,b; of {', '.join(get_args(Policy))}",
    )
    parser.add_argument(
        "--max-num-seqs", type=numbers, default=[256], help="with --trace, e.g. 64,1024,2048"
    )
    parser.add_argument(
        "--cache-share",
        type=positive("all"),
        default=[None],
        help="with --trace: what the cache holds of all passages, e.g. all,0.1",
    )
    parser.add_argument(
        "--documents", type=numbers, default=None, help="documents of `ttft`, e.g. 10,30,100"
    )
    parser.add_argument("--document-tokens", type=number, default=None, help="of each, for `ttft`")
    parser.add_argument(
        "--decode",
        type=_decode_cases,
        default=None,
        help="cases of `decode`: BATCHxCONTEXT[:DOCUMENTS], …",
    )
    add_engine_options(parser)
    parser.add_argument("--json", type=Path, default=None, help="write figures there")


def _bench(name: str) -> str:
    if name in _OWN_COMMANDS:
        raise argparse.ArgumentTypeError(
            f"{name} has options of its own, and is measured alone: minipic bench {name}"
        )
    if name not in BENCHES:
        raise argparse.ArgumentTypeError(
            f"no bench {shown(name)}; known: {', '.join(BENCHES + _OWN_COMMANDS)}"
        )
    return name


def _decode_cases(text: str) -> list[tuple[int, int, int]]:
    """(batch, context, documents) of each case."""
    cases = []
    for case in text.split(","):
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?::(\d+))?", case)
        if found is None:
            raise argparse.ArgumentTypeError(
                f"{shown(case)}: BATCHxCONTEXT[:DOCUMENTS], e.g. 1x8192 or 1x10000:10"
            )
        batch, context, documents = found.groups(default="0")
        cases.append((int(batch), int(context), int(documents)))
    return cases


def run(options: argparse.Namespace) -> int:
    """Measures, prints a table, and writes JSON if asked.

    Raises:
        ConfigurationError: options that do not go together, or an unknown shape.
        MiniPICError: what keeps an engine from starting or answering.
    """
    num_samples = len(options.samples or [0])
    if options.trace and len(options.reuse) not in (1, num_samples):
        raise ConfigurationError("--reuse and --samples differ in length")
    if num_samples > 1 and not options.trace:
        raise ConfigurationError("--samples: several only with --trace")
    # A forked engine could not use CUDA once this process has asked for the device.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if options.trace:
        os.environ |= ALLOW
    import torch

    on_gpu = torch.cuda.is_available()
    model = options.model or ("shape:llama-3-8b" if on_gpu else _demo_model())
    arguments = _engine_args(options, on_gpu=on_gpu)
    baseline = options.compare[0] if options.compare else None
    rows: list[Row] = []
    for variant in [*options.compare, *options.engine]:
        say(f"Starting {variant}")
        # With an engine process on a CPU, vLLM keeps the worker in a third: no way for `retune`.
        separate = on_gpu or not options.trace
        with open_session(variant, model, arguments, separate_process=separate) as session:
            about = environment(model, arguments)
            for row in _figures(session, options, on_gpu=on_gpu):
                rows = with_ideal([*rows, row], baseline)
                say(f"  {row.bench} {row.case}: {row.median:.4g} {row.unit}")
                if options.json:  # after each figure: a run that is cut short leaves what it has
                    write_json(options.json, rows, about)
    print(f"{about['device']}, vLLM {about['vllm']}, torch {about['torch']}, {model}")
    print(format_table(rows, baseline))
    if options.trace:
        print(format_trace_table(rows))
    return 0


def _figures(session: Session, options: argparse.Namespace, *, on_gpu: bool) -> Iterator[Row]:
    yield measure_capacity(session)
    for bench in options.bench:  # in the order given
        if bench == "throughput":
            yield from _throughput_figures(session, options, on_gpu=on_gpu)
        elif bench == "ttft":
            yield from _ttft_figures(session, options, on_gpu=on_gpu)
        else:
            yield from _decode_figures(session, options, on_gpu=on_gpu)


def _throughput_figures(
    session: Session, options: argparse.Namespace, *, on_gpu: bool
) -> Iterator[Row]:
    samples = options.samples or [1000 if on_gpu else 10]
    if options.trace:
        yield from _trace_figures(session, options, samples)
    else:
        yield from measure_throughput(session, samples=samples[0], runs=options.runs)


def _ttft_figures(session: Session, options: argparse.Namespace, *, on_gpu: bool) -> Iterator[Row]:
    size = options.document_tokens or (1000 if on_gpu else 100)
    for count in options.documents or ([10, 30, 100] if on_gpu else [4, 10]):
        yield from measure_ttft(session, documents=count, document_tokens=size, runs=options.runs)


def _decode_figures(
    session: Session, options: argparse.Namespace, *, on_gpu: bool
) -> Iterator[Row]:
    usual = "1x8192,32x8192,64x2048,1x10000:10" if on_gpu else "1x512,1x512:4"
    for batch, context, documents in options.decode or _decode_cases(usual):
        session.reset_cache()
        yield from measure_decode(
            session, batch=batch, context=context, documents=documents, runs=options.runs
        )


def _trace_figures(
    session: Session, options: argparse.Namespace, samples: list[int]
) -> Iterator[Row]:
    trace = random_trace(6119) if options.trace == "random" else read_trace(Path(options.trace))
    cases = [
        TraceCase(policy, seqs, share)
        for share in options.cache_share
        for policy in options.policy
        for seqs in options.max_num_seqs
    ]
    reuses = options.reuse
    if not session.has_spans:
        # It reuses nothing but a prefix: its tokens per second are what counts.
        samples, reuses = [min(samples[0], _STOCK_SAMPLES)], [None]
    if len(reuses) < len(samples):
        reuses = reuses * len(samples)
    for count, reuse in zip(samples, reuses, strict=True):
        workload = draw_workload(trace, count, reuse)
        yield from measure_trace(session, workload, cases, runs=options.runs)


def _engine_args(options: argparse.Namespace, *, on_gpu: bool) -> dict[str, Any]:
    given = engine_args(options)
    if options.trace:
        given["distributed_executor_backend"] = "uni"  # scheduler and worker in one process
        given["max_num_seqs"] = max(options.max_num_seqs)
    if not on_gpu:
        # A stock engine takes blocks of 128 tokens on a CPU: the same size for both.
        given = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 2**30, **given}
    return given


def _demo_model() -> str:
    from minipic_backend.models import HUB_NAME, resolve_model

    return resolve_model(HUB_NAME)
