"""Cached blocks kept from eviction for requests that wait to be admitted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["Holds"]


class Holds:
    """References to blocks, one set for each waiting request.

    A hold is a courtesy and never a claim: `release_all` comes before any allocation fails, so
    that holds cost other requests nothing but their place in the eviction order.

    Args:
        pool: vLLM's `BlockPool`.
        max_blocks: the most blocks that all holds may have together.
    """

    def __init__(self, pool: Any, max_blocks: int) -> None:
        self._pool = pool
        self._max_blocks = max_blocks
        self._held: dict[str, dict[int, Any]] = {}  # by request, then by block id
        self.num_blocks = 0
        """Blocks held, one held for two requests counted twice."""
        self.num_released_early = 0
        """How often an allocation took the holds back."""

    def __bool__(self) -> bool:
        return bool(self._held)

    def add(self, request_id: str, blocks: Iterable[Any]) -> bool:
        """Holds blocks for a request, on top of those that it has; False where it is too many."""
        held = self._held.get(request_id, {})
        new = {block.block_id: block for block in blocks if block.block_id not in held}
        if self.num_blocks + len(new) > self._max_blocks:
            return False
        if new:
            self._pool.touch(list(new.values()))
            self._held[request_id] = held | new
            self.num_blocks += len(new)
        return True

    def release(self, request_id: str) -> None:
        """Gives a request's blocks back; the last ones are evicted first, as vLLM does."""
        blocks = self._held.pop(request_id, None)
        if blocks:
            self.num_blocks -= len(blocks)
            self._pool.free_blocks(reversed(blocks.values()))

    def release_all(self) -> bool:
        """Gives everything back, the latest holds first; False where there was nothing."""
        if not self._held:
            return False
        self.num_released_early += 1
        for request_id in reversed(list(self._held)):
            self.release(request_id)
        return True
