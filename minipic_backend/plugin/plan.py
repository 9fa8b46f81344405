"""One request with spans, from its turn until its prompt is computed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from minipic_backend.plugin.parts import Part
from minipic_backend.plugin.span_jobs import Promise, SpanJob
from minipic_backend.spans.figures import SpanFigures
from minipic_backend.spans.segments import SegmentTable

__all__ = ["Plan"]


@dataclass(slots=True, eq=False)
class Plan:
    """A request with spans, from its turn until its prompt is computed.

    Args:
        request: vLLM's request.
        table: its segments.
        parts: what of it can be cached.
        since: `time.monotonic()` of its turn.
    """

    request: Any
    table: SegmentTable
    parts: tuple[Part, ...]
    since: float
    rounds: int = 0
    admitted: bool = False
    waits_for: list[Promise] = field(default_factory=list)
    jobs: list[SpanJob] = field(default_factory=list)
    own: dict[bytes, int] = field(default_factory=dict)
    """Blocks that its own jobs compute, by key of the part."""
    shared: set[bytes] = field(default_factory=set)
    """Parts that others compute."""
    promised: list[bytes] = field(default_factory=list)
    """Parts that it computes in place."""

    def key(self, part: Part) -> bytes:
        return bytes(self.request.block_hashes[part.end_block - 1])

    def own_tokens(self, num_cached_tokens: int, block_size: int) -> int:
        """What its own jobs computed of the tokens that it read."""
        if not self.own:
            return 0
        own_left = dict(self.own)
        num_blocks = 0
        for part in self.parts:
            read = min(max(num_cached_tokens // block_size - part.first_block, 0), part.num_blocks)
            num_blocks += min(own_left.pop(self.key(part), 0), read)
        return num_blocks * block_size

    def figures(self, num_cached_tokens: int, block_size: int) -> SpanFigures:
        """Where its span tokens came from, if so many tokens of its prompt were read."""
        hit = waited = computed = 0
        own_left = dict(self.own)
        for part in self.parts:
            if not part.is_span:
                continue
            key = self.key(part)
            read = min(max(num_cached_tokens // block_size - part.first_block, 0), part.num_blocks)
            computed += part.num_blocks - read
            if key in self.own:
                own = min(own_left.pop(key, 0), read)
                computed += own
                hit += read - own
            elif key in self.shared:
                waited += read
            else:
                hit += read
        wait_s = time.monotonic() - self.since if self.own or self.shared else 0.0
        return SpanFigures(hit * block_size, waited * block_size, computed * block_size, wait_s)
