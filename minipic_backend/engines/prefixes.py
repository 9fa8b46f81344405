"""The prefixes that an engine met last: documents are warmed behind them."""

from __future__ import annotations

import threading
from collections import OrderedDict

__all__ = ["RecentPrefixes"]


class RecentPrefixes:
    """Token ids of the last few distinct prefixes. Thread-safe.

    Args:
        capacity: how many to remember. Warming costs one computation per document and prefix.
    """

    def __init__(self, capacity: int = 2) -> None:
        self._capacity = capacity
        self._prefixes: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, token_ids: tuple[int, ...]) -> None:
        """Remembers a prefix; an empty one (no spans, or none behind a prefix) is not one."""
        if not token_ids:
            return
        with self._lock:
            self._prefixes[token_ids] = None
            self._prefixes.move_to_end(token_ids)
            while len(self._prefixes) > self._capacity:
                self._prefixes.popitem(last=False)

    def latest(self) -> list[tuple[int, ...]]:
        """The remembered prefixes, the latest first."""
        with self._lock:
            return list(reversed(self._prefixes))
