"""`minipic bench throughput|ttft|decode`: engines one after another, or several in turns; one
table."""

from __future__ import annotations

import argparse
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, get_args

from tqdm import tqdm

from minipic_backend.bench.engines import VARIANTS, Session, open_session
from minipic_backend.bench.measure import Row
from minipic_backend.bench.measure_trace import format_trace_table, with_ideal
from minipic_backend.bench.options import (
    add_engine_options,
    add_output_options,
    choices,
    decode_cases,
    engine_args,
    number,
    numbers,
    positive,
)
from minipic_backend.bench.plan import Measurement, plan
from minipic_backend.bench.progress import progress_bar, say
from minipic_backend.bench.report import environment, format_table, write_json, write_plot
from minipic_backend.bench.retune import ALLOW
from minipic_backend.config import Policy
from minipic_backend.errors import ConfigurationError, EngineStartError, shown

__all__ = ["add_arguments", "run"]

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
    parser.add_argument(
        "--together",
        action="store_true",
        help="all engines open at once, each round by one after another, and ratios within a "
        "round; they share out the GPU's memory; not with --trace",
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
        type=decode_cases,
        default=None,
        help="cases of `decode`: BATCHxCONTEXT[:DOCUMENTS], …",
    )
    add_engine_options(parser)
    add_output_options(parser)


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


def run(options: argparse.Namespace) -> int:
    """Measures, prints a table, and writes JSON and a plot if asked.

    Raises:
        ConfigurationError: options that do not go together, an unknown shape, or no such trace.
        MiniPICError: what keeps an engine from starting or answering.
    """
    num_samples = len(options.samples or [0])
    if options.trace and len(options.reuse) not in (1, num_samples):
        raise ConfigurationError("--reuse and --samples differ in length")
    if num_samples > 1 and not options.trace:
        raise ConfigurationError("--samples: several only with --trace")
    variants = [*options.compare, *options.engine]
    if len(set(variants)) < len(variants):
        raise ConfigurationError("--compare, --engine: each engine once")
    if options.together and options.trace:
        raise ConfigurationError("--together: not with --trace, which needs all of the memory")
    if options.together and not options.compare:
        raise ConfigurationError("--together: with --compare, e.g. --compare stock")
    # A forked engine could not use CUDA once this process has asked for the device.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if options.trace:
        os.environ |= ALLOW
    import torch

    on_gpu = torch.cuda.is_available()
    model = options.model or ("shape:llama-3-8b" if on_gpu else _demo_model())
    arguments = _engine_args(options, on_gpu=on_gpu)
    baseline = options.compare[0] if options.compare else None
    plans = plan(options, variants, on_gpu=on_gpu)
    # With an engine process on a CPU, vLLM keeps the worker in a third: no way for `retune`.
    separate = on_gpu or not options.trace
    rows: list[Row] = []
    about: dict[str, Any] = {}
    try:
        with closing(_measure(plans, model, arguments, separate_process=separate)) as measured:
            for row, about in measured:
                rows = with_ideal([*rows, row], baseline)
                if options.json:
                    write_json(options.json, rows, about)
    finally:  # a run that is cut short leaves what it has
        if rows:
            print(f"{about['device']}, vLLM {about['vllm']}, torch {about['torch']}, {model}")
            print(format_table(rows, baseline))
        if rows and options.trace:
            print(format_trace_table(rows))
    if options.plot:
        write_plot(options.plot, rows, model, about)
    return 0


def _measure(
    plans: Sequence[tuple[Sequence[str], Sequence[Measurement]]],
    model: str,
    arguments: dict[str, Any],
    *,
    separate_process: bool,
) -> Generator[tuple[Row, dict[str, Any]], None, None]:
    """Starts the engines of each plan and measures: figures, and what they were made on."""
    # An engine's start counts as one.
    total = sum(
        len(variants) + sum(one.num_prompts for one in measurements)
        for variants, measurements in plans
    )
    with progress_bar(total) as bar:
        for variants, measurements in plans:
            with _open(
                variants, model, arguments, bar, separate_process=separate_process
            ) as sessions:
                about = environment(model, arguments)
                for measurement in measurements:
                    bar.set_description(f"{', '.join(variants)}: {measurement.bench}")
                    for row in measurement.measure(*sessions):
                        of = f"{row.variant}, " if len(variants) > 1 else ""
                        say(f"  {of}{row.bench} {row.case}: {row.median:.4g} {row.unit}")
                        yield row, about


@contextmanager
def _open(
    variants: Sequence[str],
    model: str,
    arguments: Mapping[str, Any],
    bar: tqdm[Any],
    *,
    separate_process: bool,
) -> Iterator[list[Session]]:
    """Starts engines, one after another, and closes them all."""
    with ExitStack() as stack:
        sessions: list[Session] = []
        for variant in variants:
            say(f"Starting {variant}")
            bar.set_description(variant)
            session = open_session(
                variant,
                model,
                arguments,
                separate_process=separate_process,
                progress=bar.update,
            )
            try:
                sessions.append(stack.enter_context(session))
            except EngineStartError as error:
                if len(variants) == 1:
                    raise
                text = f"{variant}, one of {len(variants)} engines at once: {error}"
                raise EngineStartError(text) from error
            bar.update()
        yield sessions


def _engine_args(options: argparse.Namespace, *, on_gpu: bool) -> dict[str, Any]:
    given = engine_args(options)
    if options.trace:
        given["distributed_executor_backend"] = "uni"  # scheduler and worker in one process
        given["max_num_seqs"] = max(options.max_num_seqs)
    if options.together and on_gpu:
        from vllm.engine.arg_utils import EngineArgs

        whole = given.get("gpu_memory_utilization", EngineArgs.gpu_memory_utilization)
        engines = len([*options.compare, *options.engine])
        given["gpu_memory_utilization"] = whole / engines
    if not on_gpu:
        # A stock engine takes blocks of 128 tokens on a CPU: the same size for both.
        given = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 2**30, **given}
    return given


def _demo_model() -> str:
    from minipic_backend.models import HUB_NAME, resolve_model

    return resolve_model(HUB_NAME)
