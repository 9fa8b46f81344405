"""`minipic demo`: from an empty cache folder to answers and figures."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from typing import TYPE_CHECKING

from tqdm import tqdm

from minipic_backend.demo.corpus import load_passages
from minipic_backend.demo.questions import QUESTIONS
from minipic_backend.errors import ConfigurationError
from minipic_backend.models import HUB_NAME, resolve_model

if TYPE_CHECKING:
    from minipic_backend.engines.embedded import Engine

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `minipic demo`."""
    parser.add_argument(
        "--model", default=HUB_NAME, help="folder or hub name (default: %(default)s)"
    )
    parser.add_argument(
        "--questions",
        type=int,
        default=len(QUESTIONS),
        metavar="N",
        help=f"ask the first N of {len(QUESTIONS)} questions (default: all)",
    )
    parser.add_argument(
        "--documents",
        type=int,
        default=10,
        metavar="N",
        help="documents retrieved for each question (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Runs the demo and prints it.

    Raises:
        ConfigurationError: an option out of range, or a package of the extra `demo` missing.
        MiniPICError: what keeps the engine from starting.
    """
    passages = load_passages()
    _check("--questions", options.questions, len(QUESTIONS))
    _check("--documents", options.documents, len(passages))
    _quiet()
    model = resolve_model(options.model)
    print(
        f"{len(passages)} passages of Python's language reference, {options.documents} for each "
        f"question.\nStarting vLLM with {options.model} on this machine ...",
        flush=True,
    )
    started = time.perf_counter()
    from minipic_backend.engines.embedded import Engine

    with Engine(model, use_tqdm_on_load=False) as engine:
        print(f"Ready after {time.perf_counter() - started:.0f} s.\n", flush=True)
        _ask(engine, options)
    return 0


def _ask(engine: Engine, options: argparse.Namespace) -> None:
    try:
        from minipic_backend.demo.measure import Session
        from minipic_backend.demo.report import result_line, show_measurement, show_summary
        from minipic_backend.demo.retriever import PassageRetriever
    except ImportError as error:
        raise ConfigurationError(f"{error}: pip install 'minipic[demo]'") from error

    retriever = PassageRetriever.over(load_passages(), k=options.documents)
    session = Session(engine, retriever)
    questions = QUESTIONS[: options.questions]
    measured = []
    # disable=None: no bar where stderr is no terminal; the answers show progress enough.
    with tqdm(
        total=Session.WARM_UP_STEPS + Session.STEPS * len(questions),
        unit="prompt",
        leave=False,
        disable=None,
    ) as bar:
        bar.set_description("warming up")
        session.warm_up(bar.update)
        for number, question in enumerate(questions, 1):
            bar.set_description(f"question {number}/{len(questions)}")
            measured.append(session.measure(question.text, bar.update))
            bar.clear()
            print(show_measurement(number, question, measured[-1]), flush=True)
            bar.refresh()
    print(show_summary(questions, measured))
    print(result_line(measured), flush=True)


def _check(option: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ConfigurationError(f"{option} {value}: from 1 to {most}")


def _quiet() -> None:
    """vLLM's and torch's start-up notes are not what a demo is about. Must precede their import;
    what the user set stays."""
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        logging.getLogger("vllm").setLevel(logging.ERROR)  # until vLLM has read the variable
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
