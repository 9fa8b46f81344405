"""`minipic doctor`: a line for each thing that has to be right, and what to do where it is not."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from minipic_backend.cli import checks
from minipic_backend.cli.server_checks import check_server

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `minipic doctor`."""
    parser.add_argument("--model", metavar="MODEL", help="check this model's tokenizer too")
    parser.add_argument(
        "--base-url",
        metavar="URL",
        help="check a server end to end instead, such as http://host:8000/v1; --model is then "
        "the name that it serves",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="of that server; default: $MINIPIC_API_KEY"
    )


def run(options: argparse.Namespace) -> int:
    """Prints the findings; 1 where one is a failure, else 0."""
    failed = False
    findings = (
        check_server(options.base_url, options.model, options.api_key)
        if options.base_url
        else _findings(options.model)
    )
    for finding in findings:
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
