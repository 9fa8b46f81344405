"""Where the span tokens of one request came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["SpanFigures"]


@dataclass(frozen=True, slots=True)
class SpanFigures:
    """Counted when a request was first admitted; the three token counts add up to its spans.

    Args:
        hit_tokens: were in the cache when the request's turn came.
        waited_tokens: were being computed for another request just then.
        computed_tokens: were computed for this request, in place or by jobs of its own.
        wait_s: seconds from its turn to its admission, spent waiting for its spans.
    """

    hit_tokens: int
    waited_tokens: int
    computed_tokens: int
    wait_s: float

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpanFigures:
        """The inverse of `to_dict`."""
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
