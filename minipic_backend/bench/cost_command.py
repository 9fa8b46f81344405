"""`minipic bench cost`: what each technique costs, on this machine's engine."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minipic_backend.bench.options import (
    add_engine_options,
    add_output_options,
    engine_args,
    number,
    numbers,
)
from minipic_backend.bench.progress import progress_bar, say
from minipic_backend.errors import ConfigurationError, shown
from minipic_backend.models import HUB_NAME
from minipic_backend.quality.passages import Passage, load_passages
from minipic_backend.quality.prompts import PromptForm
from minipic_backend.quality.techniques import TechniqueSpec, parse_technique

__all__ = ["add_arguments", "run"]

_TECHNIQUES = (
    "full",
    "block_attention",
    "primed:late=0",
    "primed",
    "primed:late=2",
    "epic:blocks=1",
    "epic:blocks=2",
    "selective:budget=0.05",
    "selective:budget=0.1",
    "selective:budget=0.15",
)
_INVENTED = 2500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `minipic bench cost`."""
    parser.add_argument(
        "--model",
        default=None,
        help="folder, hub name, or shape:NAME with random weights "
        f"(default: shape:llama-3-8b on a GPU, {HUB_NAME} on a CPU)",
    )
    parser.add_argument(
        "--tokenizer", default=HUB_NAME, help="folder or hub name, for a shape (default: SmolLM2's)"
    )
    parser.add_argument(
        "--techniques",
        nargs="+",
        default=list(_TECHNIQUES),
        metavar="NAME[:key=value,…]",
        help="techniques to measure (default: %(default)s)",
    )
    parser.add_argument(
        "--passages", type=Path, help="JSONL with title and text (default: invented passages)"
    )
    parser.add_argument("--documents", type=number, default=10, help="documents in a prompt")
    parser.add_argument(
        "--document-tokens",
        type=numbers,
        default=[0],
        help="join passages to documents of so many tokens, e.g. 130,1000 "
        "(default: each passage is a document)",
    )
    parser.add_argument(
        "--sample", type=number, default=8, help="prompts served alone, for the TTFT"
    )
    parser.add_argument(
        "--prompts",
        type=numbers,
        default=None,
        help="prompts served together, for the throughput; one number, or one for each of "
        "--document-tokens (default: 100 on a GPU, 16 on a CPU)",
    )
    parser.add_argument("--runs", type=number, default=1, help="runs of the throughput")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--process", choices=("inline", "separate"), default="inline", help="where vLLM runs"
    )
    add_engine_options(parser)
    add_output_options(parser)


def run(options: argparse.Namespace) -> int:
    """Measures, prints a table, and writes JSON and a plot if asked.

    Raises:
        ConfigurationError: a wrong option or file.
        MiniPICError: what keeps the engine from starting or answering.
    """
    # A forked engine could not use CUDA once this process has asked for the device.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    import torch

    from minipic_backend.bench.cost import draw_work, format_cost_table, join_passages, measure_cost
    from minipic_backend.bench.models import model_arguments
    from minipic_backend.bench.report import environment, write_json, write_plot
    from minipic_backend.engines.embedded import Engine
    from minipic_backend.quality.invented import invented_passages
    from minipic_backend.quality.primers import primer_choices

    on_gpu = torch.cuda.is_available()
    model = options.model or ("shape:llama-3-8b" if on_gpu else HUB_NAME)
    sizes = options.document_tokens
    counts = options.prompts or [100 if on_gpu else 16]
    if len(counts) not in (1, len(sizes)):
        raise ConfigurationError("--prompts and --document-tokens differ in length")
    given = load_passages(options.passages) if options.passages else invented_passages(_INVENTED)
    form = PromptForm()
    specs = _specs(options.techniques, primer_choices(given, form.show))
    arguments = engine_args(options)

    say(f"Starting vLLM with {model} ...")
    started = time.perf_counter()
    rows = []
    # An engine's start counts as one; each technique has three figures.
    total = 1 + 3 * len(sizes) * len(specs)
    with (
        progress_bar(total, unit="figure") as bar,
        model_arguments(model, options.tokenizer) as served,
        Engine(
            **{**served, **arguments}, process=options.process, use_tqdm_on_load=False
        ) as engine,
    ):
        bar.update()
        say(f"  {time.perf_counter() - started:.0f} s")
        if getattr(engine.tokenizer, "chat_template", None) is None:
            form = PromptForm(chat=False)
        about = environment(model, arguments)
        about["tokenizer"] = options.tokenizer if model.startswith("shape:") else model
        started = time.perf_counter()
        for number, size in enumerate(sizes):
            case = f"{options.documents} x {size}" if size else f"{options.documents} passages"
            passages: Sequence[Passage] = given
            if size:
                passages = join_passages(given, size, engine, form.show)
            work = draw_work(
                passages,
                case=case,
                documents=options.documents,
                sample=options.sample,
                prompts=counts[number % len(counts)],
                runs=options.runs,
                seed=options.seed,
            )
            for spec in specs:
                bar.set_description(f"{case}: {spec.label}")
                for row in measure_cost(engine, work, spec, form):
                    bar.update()
                    rows.append(row)
                    seconds = time.perf_counter() - started
                    figure = f"{row.bench} {row.median:.4g} {row.unit}"
                    say(f"  {seconds:4.0f} s  {case}, {spec.label}: {figure}")
                    if row.details.get("span_tokens_missed"):
                        say("  The cache does not hold these documents: throughput is too low")
                if options.json:  # a run that is cut short leaves what it has
                    write_json(options.json, rows, about)
    print(f"{about['device']}, vLLM {about['vllm']}, torch {about['torch']}, {model}")
    print(format_cost_table(rows))
    if options.plot:
        write_plot(options.plot, rows, model, about)
    return 0


def _specs(texts: Sequence[str], primers: Any) -> list[TechniqueSpec]:
    """Techniques, each checked before an engine starts."""
    from minipic_backend.choices import LAYOUT_DEFAULTS, check_warmable, choose_layout

    specs = [parse_technique(text, primers) for text in texts]
    for spec in specs:
        settings, _ = choose_layout(LAYOUT_DEFAULTS, spec.options)
        check_warmable(settings)
        if "rank" in spec.prompt:
            raise ConfigurationError(f"Technique {shown(spec.label)}: rank does not change costs")
    return specs
