"""Block hashes of spans and prefixes seen before, for the next prompt that has them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

__all__ = ["SpanHashes"]


class SpanHashes:
    """Remembers the hashes of whole spans and prefixes, the latest used ones, up to a number of
    tokens.

    Not thread-safe, and need not be: it is asked for the spans of a prompt when that prompt's turn
    comes, on the scheduler's thread.

    Args:
        max_tokens: tokens of all that it remembers together; about 10 bytes each.
    """

    def __init__(self, max_tokens: int = 4_000_000) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._spans: OrderedDict[tuple[Any, ...], tuple[int, list[bytes]]] = OrderedDict()

    def get(self, key: tuple[Any, ...]) -> list[bytes] | None:
        """Hashes that were put under `key`."""
        found = self._spans.get(key)
        if found is None:
            return None
        self._spans.move_to_end(key)
        return found[1]

    def put(self, key: tuple[Any, ...], num_tokens: int, hashes: list[bytes]) -> None:
        """Remembers `hashes`; `key` must hold everything that they depend on."""
        if num_tokens > self._max_tokens or key in self._spans:
            return
        self._spans[key] = num_tokens, hashes
        self._num_tokens += num_tokens
        while self._num_tokens > self._max_tokens:
            _, (evicted, _) = self._spans.popitem(last=False)
            self._num_tokens -= evicted
