"""Options of the engine that benchmarks share."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_engine_options", "engine_args"]

_NAMES = ("max_model_len", "max_num_batched_tokens", "gpu_memory_utilization", "enforce_eager")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """`--max-model-len` and the like."""
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--max-num-batched-tokens", type=int, default=None)
    parser.add_argument("--gpu-memory-utilization", type=float, default=None)
    parser.add_argument("--enforce-eager", action="store_true", default=None)
    parser.add_argument(
        "--graph-sizes", default=None, help="batches to capture CUDA graphs for; few start faster"
    )


def engine_args(options: argparse.Namespace) -> dict[str, Any]:
    """Those that were given, as arguments of vLLM's `EngineArgs`."""
    given = {name: getattr(options, name) for name in _NAMES if getattr(options, name) is not None}
    if options.graph_sizes:
        sizes = [int(size) for size in options.graph_sizes.split(",")]
        given["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    return given
