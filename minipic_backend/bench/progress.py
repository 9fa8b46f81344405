"""What a bench tells while it runs: on stderr, since its figures are for stdout."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

__all__ = ["progress_bar", "say"]


def say(text: str) -> None:
    """One line, seen at once, above the progress bar if there is one."""
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


def progress_bar(total: int, unit: str = "prompt") -> tqdm[Any]:
    """A bar over what is to be measured; none where stderr is no terminal."""
    return tqdm(total=total, unit=unit, disable=None, file=sys.stderr)
