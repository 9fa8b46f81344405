"""What the benches' options have in common: how values are read, and options of vLLM's engine."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from minipic_backend.errors import shown

__all__ = [
    "PREFIX_TOKENS",
    "QUESTION_TOKENS",
    "add_engine_options",
    "add_output_options",
    "choices",
    "decode_cases",
    "engine_args",
    "number",
    "numbers",
    "positive",
]

PREFIX_TOKENS, QUESTION_TOKENS = 64, 50
"""What stands around the documents of `ttft` and `decode`."""

_NAMES = ("max_model_len", "max_num_batched_tokens", "gpu_memory_utilization", "enforce_eager")


def number(text: str) -> int:
    """A type for argparse: a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{shown(text)}: a whole number from 1")
    return int(text)


def numbers(text: str) -> list[int]:
    """A type for argparse: whole numbers from 1, such as `10,30,100`."""
    return [number(word) for word in text.split(",")]


def positive(none: str) -> Callable[[str], list[float | None]]:
    """A type for argparse: numbers above 0, or the word `none` for None, such as `all,0.1`."""

    def read(text: str) -> list[float | None]:
        return [None if word == none else _above_0(word, none) for word in text.split(",")]

    return read


def choices(what: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """A type for argparse: names out of `known`, such as `stock,span_local`."""

    def read(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"no {what} {shown(name)}; known: {', '.join(known)}"
                )
        return text.split(",")

    return read


def decode_cases(text: str) -> list[tuple[int, int, int]]:
    """A type for argparse: (batch, context, documents) of cases, such as `1x8192,1x10000:10`."""
    cases = []
    for case in text.split(","):
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?::(\d+))?", case)
        if found is None:
            raise argparse.ArgumentTypeError(
                f"{shown(case)}: BATCHxCONTEXT[:DOCUMENTS], e.g. 1x8192 or 1x10000:10"
            )
        batch, context, documents = (int(word) for word in found.groups(default="0"))
        least = PREFIX_TOKENS + QUESTION_TOKENS + documents
        if documents and context < least:
            raise argparse.ArgumentTypeError(
                f"{shown(case)}: {documents} documents, and what stands around them, are {least} "
                "tokens at least"
            )
        cases.append((batch, context, documents))
    return cases


def add_output_options(parser: argparse.ArgumentParser, what: str = "figures") -> None:
    """`--json` and `--plot`: what cannot be written is told before anything is measured.

    Args:
        parser: of a bench.
        what: it writes as JSON.
    """
    parser.add_argument("--json", type=_file, default=None, help=f"write {what} there")
    parser.add_argument(
        "--plot", type=_plot_file, default=None, help="write a plot there, e.g. x.png (matplotlib)"
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """`--max-model-len` and the like."""
    group = parser.add_argument_group("vLLM's engine", "left out: the engine's defaults")
    group.add_argument("--max-model-len", type=int, default=None, help="tokens of the context")
    group.add_argument(
        "--max-num-batched-tokens", type=number, default=None, help="the most tokens of one step"
    )
    group.add_argument(
        "--gpu-memory-utilization", type=float, default=None, help="share of the GPU's memory"
    )
    group.add_argument(
        "--enforce-eager", action="store_true", default=None, help="no CUDA graphs, no compiling"
    )
    group.add_argument(
        "--graph-sizes",
        type=numbers,
        default=None,
        help="batches to capture CUDA graphs for, e.g. 1,8; few start faster",
    )


def engine_args(options: argparse.Namespace) -> dict[str, Any]:
    """Those that were given, as arguments of vLLM's `EngineArgs`."""
    given = {name: getattr(options, name) for name in _NAMES if getattr(options, name) is not None}
    if options.graph_sizes:
        given["compilation_config"] = {"cudagraph_capture_sizes": options.graph_sizes}
    return given


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{shown(text)}: a folder, not a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{shown(text)}: no folder {shown(str(path.parent))}")
    return path


def _plot_file(text: str) -> Path:
    path = _file(text)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise argparse.ArgumentTypeError(f"{error}: pip install 'minipic[plot]'") from error
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise argparse.ArgumentTypeError(
            f"{shown(text)}: not a name of a plot; it ends in .{', .'.join(known)}"
        )
    return path


def _above_0(word: str, none: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{shown(word)}: a number above 0, or `{none}`")
    return value
