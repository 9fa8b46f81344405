"""`minipic doctor`: a line for each thing that has to be right, and what to do where it is not."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from minipic_backend.cli import checks

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `minipic doctor`."""
    parser.add_argument("--model", metavar="MODEL", help="check this model's tokenizer too")


def run(options: argparse.Namespace) -> int:
    """Prints the findings; 1 where one is a failure, else 0."""
    failed = False
    for finding in _findings(options.model):
        print(f"{finding.state:<5} {finding.what}", flush=True)
        if finding.advice:
            print(f"      -> {finding.advice}", flush=True)
        failed = failed or finding.state == "FAIL"
    return 1 if failed else 0


def _findings(model: str | None) -> Iterator[checks.Finding]:
    yield from checks.check_python()
    yield from checks.check_addons()
    yield from checks.check_vllm()
    yield from checks.check_plugin()
    yield from checks.check_integrations()
    if model is not None:
        yield from checks.check_model(model)
