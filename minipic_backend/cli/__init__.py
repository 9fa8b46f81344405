"""The command `minipic`. Every subcommand is a module with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from minipic_backend.errors import MiniPICError

__all__ = ["main"]

_COMMANDS = {
    "demo": (
        "minipic_backend.demo.command",
        "answer questions over real documents, on this machine",
    ),
    "doctor": ("minipic_backend.cli.doctor", "check this installation, say what to do"),
    "explain": ("minipic_backend.cli.explain", "show how a prompt is laid out in segments"),
    "bench-quality": (
        "minipic_backend.quality.command",
        "measure answers against full attention's (also: minipic bench quality)",
    ),
    "bench-cost": (
        "minipic_backend.bench.cost_command",
        "measure what techniques cost: time to first token, throughput (also: minipic bench cost)",
    ),
    "serve": ("minipic_backend.cli.serve", "vLLM's server, with documents reused as spans"),
    "adapt": ("minipic_backend.adapt.command", "teach a model spans: train a LoRA adapter"),
    "bench": ("minipic_backend.bench.command", "measure throughput, time to first token, decoding"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status.

    0: done. 1: a check failed. 2: a wrong option, file or model, told in one line on stderr.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    name = "-".join(arguments[:2])
    if name in _COMMANDS:  # some benches have options unlike those of the others
        arguments[:2] = [name]
    command = arguments[0] if arguments else None
    try:
        if command == "serve":  # most of its options are vLLM's, which vLLM parses
            from minipic_backend.cli.serve import serve

            return serve(arguments[1:])
        options = _parser(command).parse_args(arguments)
        return int(options.run(options) or 0)
    except MiniPICError as error:
        print(f"minipic {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"minipic {command}: interrupted", file=sys.stderr)
        return 130


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser; of the subcommands only the chosen one is imported."""
    from minipic_backend import __version__

    parser = argparse.ArgumentParser(
        prog="minipic", description="Position-independent KV caching for RAG on stock vLLM."
    )
    parser.add_argument("--version", action="version", version=f"minipic {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module_name, about) in _COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about)
        if name == chosen and name != "serve":
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser
