"""What the benches' options have in common: how values are read, and options of vLLM's engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from typing import Any

from minipic_backend.errors import shown

__all__ = ["add_engine_options", "choices", "engine_args", "number", "numbers", "positive"]

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


def _above_0(word: str, none: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{shown(word)}: a number above 0, or `{none}`")
    return value
