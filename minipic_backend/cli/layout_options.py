"""Options of a prompt's layout, as `minipic explain` and `minipic serve` have them."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from minipic_backend.choices import LAYOUT_DEFAULTS
from minipic_backend.config import Frame, Offsets, Technique

__all__ = ["add_layout_options", "layout_defaults"]


def add_layout_options(parser: argparse._ActionsContainer) -> None:
    """Adds them to a parser, or to a group of its options."""
    parser.add_argument("--technique", choices=get_args(Technique), default="primed")
    parser.add_argument("--frame", choices=get_args(Frame), help="instead of the technique's")
    parser.add_argument("--late", type=int, metavar="K", help="instead of the technique's")
    parser.add_argument("--blocks", type=int, metavar="K", help="instead of the technique's")
    parser.add_argument("--budget", type=float, metavar="SHARE", help="instead of the technique's")
    parser.add_argument(
        "--no-primer", dest="primer", action="store_const", const=False, help="leave the primer out"
    )
    parser.add_argument(
        "--see-primer", action="store_true", default=None, help="the question sees the primer, too"
    )
    parser.add_argument(
        "--best-last",
        action=argparse.BooleanOptionalAction,
        help="documents in the order of their ranks, or as given; instead of the technique's",
    )
    parser.add_argument("--offsets", choices=get_args(Offsets), default="compact")


def layout_defaults(options: argparse.Namespace) -> dict[str, Any]:
    """`LAYOUT_DEFAULTS` with what the command line says."""
    return {name: getattr(options, name, value) for name, value in LAYOUT_DEFAULTS.items()}
