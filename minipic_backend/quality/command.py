"""`minipic bench quality`: techniques against full attention, on this machine's engine."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from minipic_backend.errors import ConfigurationError
from minipic_backend.models import HUB_NAME
from minipic_backend.quality.bench import QualityBench
from minipic_backend.quality.invented import invented_passages
from minipic_backend.quality.kinds import KINDS
from minipic_backend.quality.outcomes import summarize
from minipic_backend.quality.passages import Passage, load_passages
from minipic_backend.quality.primers import primer_choices
from minipic_backend.quality.prompts import PromptForm
from minipic_backend.quality.questions import Question, make_questions, read_questions
from minipic_backend.quality.report import Measured, format_table, write_json, write_plot
from minipic_backend.quality.techniques import TechniqueSpec, parse_technique

__all__ = ["add_arguments", "run"]

_TECHNIQUES = ("full", "primed", "primed:late=0", "primed:late=2", "block_attention")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `minipic bench quality`."""
    parser.add_argument("--model", default=HUB_NAME, help="folder, hub name, or GGUF file")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--passages",
        type=Path,
        help="JSONL with title and text, to make questions from (default: invented passages)",
    )
    source.add_argument(
        "--questions", type=Path, help="JSONL with question, documents, answers: your own set"
    )
    parser.add_argument(
        "--kinds", default="all", help=f"kinds of questions, a,b: {', '.join(KINDS)} or all"
    )
    parser.add_argument("--count", type=number, default=20, help="questions of each kind")
    parser.add_argument(
        "--documents", type=numbers, default=[10], help="documents in a prompt, or several: a,b"
    )
    parser.add_argument(
        "--alike",
        action="store_true",
        help="draw a prompt's other documents from those that state the same kind of fact",
    )
    parser.add_argument(
        "--techniques",
        nargs="+",
        default=list(_TECHNIQUES),
        metavar="NAME[:key=value,…]",
        help="techniques to compare with full attention (default: %(default)s)",
    )
    parser.add_argument(
        "--document-form", default="{title}\n{text}", help="how a document is written out"
    )
    parser.add_argument("--max-tokens", type=number, default=16, help="tokens of an answer")
    parser.add_argument(
        "--cost-sample",
        type=int,
        default=8,
        help="prompts to measure the time to first token on",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--time-limit", type=float, default=None, help="seconds after which no technique is begun"
    )
    add_engine_options(parser)
    add_output_options(parser, "figures and answers")


def run(options: argparse.Namespace) -> int:
    """Measures, prints a table, and writes JSON and a plot if asked.

    Raises:
        ConfigurationError: a wrong option or file.
        MiniPICError: what keeps the engine from starting or answering.
    """
    from minipic_backend.bench.report import environment
    from minipic_backend.engines.embedded import Engine

    started = time.perf_counter()
    passages = load_passages(options.passages) if options.passages else invented_passages()
    sets = _question_sets(options, passages)
    form = PromptForm(document=options.document_form.replace("\\n", "\n"))
    primers = primer_choices(passages, form.show)
    specs = _specs(options.techniques, primers)
    arguments = engine_args(options)
    say(f"Starting vLLM with {options.model} ...")
    measured: list[Measured] = []
    with Engine(options.model, use_tqdm_on_load=False, **arguments) as engine:
        if getattr(engine.tokenizer, "chat_template", None) is None:
            form = PromptForm(document=form.document, chat=False)
        about = environment(str(options.model), arguments)
        about["questions"] = {str(n or "own"): len(questions) for n, questions in sets}
        for number, questions in sets:
            before = list(measured)
            for found in _measure(engine, number, questions, form, specs, options, started):
                measured = before + found
                if options.json:  # after each technique: a run cut short leaves what it has
                    write_json(options.json, measured, about)
    print(f"{about['device']}, vLLM {about['vllm']}, {options.model}")
    print(format_table(measured))
    if options.plot:
        write_plot(options.plot, measured, f"{Path(options.model).name}, {about['device']}")
    return 0


def _measure(
    engine: Any,
    number: int,
    questions: Sequence[Question],
    form: PromptForm,
    specs: Sequence[TechniqueSpec],
    options: argparse.Namespace,
    started: float,
) -> Iterator[list[Measured]]:
    """Yields what was measured so far, after each technique and after the costs of all."""
    name = f"{number or 'own'} documents"
    found: list[Measured] = []
    with progress_bar(len(questions) * len(specs)) as bar:
        bar.set_description(f"{name}: full")
        since = time.perf_counter()
        bench = QualityBench(
            engine, questions, form, max_tokens=options.max_tokens, progress=bar.update
        )
        for spec in specs:
            if options.time_limit and time.perf_counter() - started > options.time_limit:
                bar.write(f"Time is up: {spec.label} and what follows is left out", sys.stderr)
                break
            bar.set_description(f"{name}: {spec.label}")
            outcomes = bench.outcomes(spec)
            figures = tuple(summarize(outcomes, bench.full))
            seconds, since = time.perf_counter() - since, time.perf_counter()
            found.append(Measured(spec, number, figures, None, seconds, tuple(outcomes)))
            bar.write(format_table(found[-1:]).splitlines()[-1], sys.stderr)
            yield found
        # Last, since this empties the cache, which techniques share.
        for place, one in enumerate(found):
            bar.set_description(f"{name}: cost of {one.spec.label}")
            found[place] = replace(one, cost=bench.cost(one.spec, options.cost_sample))
    yield found


def _question_sets(
    options: argparse.Namespace, passages: Sequence[Passage]
) -> list[tuple[int, list[Question]]]:
    """(documents in a prompt, questions); 0 documents for the user's own questions."""
    if options.questions:
        questions = read_questions(options.questions)
        if not questions:
            raise ConfigurationError(f"{options.questions}: no questions")
        return [(0, questions)]
    kinds = list(KINDS) if options.kinds == "all" else options.kinds.split(",")
    return [
        (
            documents,
            make_questions(
                passages,
                kinds=kinds,
                count=options.count,
                documents=documents,
                alike=options.alike,
                seed=options.seed,
            ),
        )
        for documents in options.documents
    ]


def _specs(texts: Sequence[str], primers: Any) -> list[TechniqueSpec]:
    """`full` is always measured, and first."""
    specs = [parse_technique(text, primers) for text in texts]
    return [parse_technique("full"), *(spec for spec in specs if spec.label != "full")]
