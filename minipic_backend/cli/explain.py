"""`minipic explain MODEL FILE`: a prompt's segments, without starting an engine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minipic_backend.choices import choose_layout
from minipic_backend.cli.layout_options import add_layout_options, layout_defaults
from minipic_backend.cli.messages import parse_prompt
from minipic_backend.config import SpanConfig
from minipic_backend.errors import ConfigurationError, PromptError
from minipic_backend.models import resolve_model, tokenizer

if TYPE_CHECKING:
    from minipic_backend.results import Explanation

__all__ = ["add_arguments", "explain", "load_tokenizer", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `minipic explain`."""
    parser.add_argument("model", metavar="MODEL", help="folder or hub name: for its tokenizer")
    parser.add_argument("file", metavar="FILE", help="JSON messages; - for standard input")
    add_layout_options(parser)
    parser.add_argument(
        "--block-size",
        type=int,
        default=32,
        metavar="TOKENS",
        help="of the engine's KV cache: 32 on a CPU (default), 16 on CUDA",
    )


def run(options: argparse.Namespace) -> int:
    """Prints the table.

    Raises:
        MiniPICError: whatever is wrong with model, file or options.
    """
    print(explain(options))
    return 0


def explain(options: argparse.Namespace) -> Explanation:
    """The layout of the prompt in `options.file`."""
    from minipic_backend.layout.markers import choose_markers
    from minipic_backend.layout.prompt_layout import Layout, explain_rows

    settings, span_options = choose_layout(layout_defaults(options), {})
    prompt = parse_prompt(_read(options.file))
    loaded = load_tokenizer(options.model)
    markers = choose_markers(loaded)
    config = SpanConfig(
        markers.ssep, markers.pdep, markers.pad, options.block_size, options=span_options
    )
    laid_out = Layout(loaded, config).lay_out(prompt, settings, options=span_options)
    return explain_rows(laid_out)


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a folder or a hub name.

    Raises:
        ModelNotFoundError: there is none, or it cannot be had.
    """
    if Path(model).is_file():
        raise ConfigurationError(f"{model} is a file; MODEL is a folder or a hub name")
    return tokenizer.load_tokenizer(resolve_model(model, progress=sys.stderr.isatty()))


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PromptError(f"cannot read {name}: {reason}") from error
