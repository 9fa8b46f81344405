"""What a bench tells while it runs: on stderr, since its figures are for stdout."""

from __future__ import annotations

import sys

__all__ = ["say"]


def say(text: str) -> None:
    """One line, seen at once."""
    print(text, file=sys.stderr, flush=True)
