"""The prefixes that an engine met last: documents are warmed behind them."""

from __future__ import annotations

import threading
from collections import OrderedDict

from minipic_backend.config import Frame

__all__ = ["RecentPrefixes"]


class RecentPrefixes:
    """Token ids of the last few distinct prefixes, by the frame that they were. Thread-safe.

    Args:
        capacity: how many to remember of each. Warming costs one computation per document and
            prefix.
    """

    def __init__(self, capacity: int = 2) -> None:
        self._capacity = capacity
        self._prefixes: dict[Frame, OrderedDict[tuple[int, ...], None]] = {}
        self._lock = threading.Lock()

    def add(self, token_ids: tuple[int, ...], frame: Frame) -> None:
        """Remembers a prefix; an empty one (no spans, or none behind a prefix) is not one."""
        if not token_ids:
            return
        with self._lock:
            prefixes = self._prefixes.setdefault(frame, OrderedDict())
            prefixes[token_ids] = None
            prefixes.move_to_end(token_ids)
            while len(prefixes) > self._capacity:
                prefixes.popitem(last=False)

    def latest(self, frame: Frame) -> list[tuple[int, ...]]:
        """The remembered prefixes, the latest first."""
        with self._lock:
            return list(reversed(self._prefixes.get(frame, ())))
