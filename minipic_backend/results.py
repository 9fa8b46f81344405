"""What an engine gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minipic_backend.table import format_rows

__all__ = [
    "Chunk",
    "Completion",
    "Explanation",
    "Result",
    "SegmentRow",
    "Timing",
    "Usage",
    "WarmReport",
]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request.

    Args:
        prompt_tokens: tokens that the engine saw, markers and pads included.
        completion_tokens: tokens generated, over all completions.
        cached_tokens: prompt tokens read from the cache; None where the engine does not say.
        cache_creation_tokens: prompt tokens computed and left in the cache (whole blocks).
        pad_tokens: pads among the prompt tokens.
        span_tokens_hit: tokens of spans that were in the cache when the request's turn came; this
            and the next two are None where the engine does not say.
        span_tokens_waited: tokens of spans that were just being computed for another request.
        span_tokens_computed: tokens of spans that were computed for this request.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    cache_creation_tokens: int | None = None
    pad_tokens: int = 0
    span_tokens_hit: int | None = None
    span_tokens_waited: int | None = None
    span_tokens_computed: int | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, on the caller's clock.

    Args:
        ttft_s: from submission to the first token.
        total_s: from submission to the last token.
        span_wait_s: of these, waiting for missing spans to be computed; None where the engine does
            not say.
    """

    ttft_s: float
    total_s: float
    span_wait_s: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One generated answer. `logprobs` has one entry a token where it was asked for:
    a mapping from token id to log-probability."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[dict[int, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request; `n` completions."""

    request_id: str
    completions: tuple[Completion, ...]
    usage: Usage
    timing: Timing

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.completions[0].finish_reason


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer: text and tokens since the last piece of completion `index`.

    `usage` and `timing` stand on the last piece of the whole stream only.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[dict[int, float], ...] | None = None
    usage: Usage | None = None
    timing: Timing | None = None


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """One row of `explain`. `cached_tokens` is None where the engine cannot look."""

    index: int
    kind: str
    label: str
    num_tokens: int
    num_pads: int
    offset: int
    cached_tokens: int | None
    preview: str

    @property
    def state(self) -> str:
        if self.cached_tokens is None:
            return "?"
        if self.cached_tokens == 0:
            return "cold"
        return "warm" if self.cached_tokens >= self.num_tokens else "part"


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a prompt is laid out; `print` it for a table."""

    rows: tuple[SegmentRow, ...]
    token_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = ("#", "kind", "what", "tokens", "pads", "offset", "state", "text")
        body = [
            (
                str(row.index),
                row.kind,
                row.label,
                str(row.num_tokens),
                str(row.num_pads),
                str(row.offset),
                row.state,
                row.preview,
            )
            for row in self.rows
        ]
        lines = format_rows([head, *body], right={0, 3, 4, 5})
        return "\n".join([*lines, *self.notes])


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What `warm` did: spans asked for, and their tokens computed and found in the cache."""

    num_spans: int
    num_computed_tokens: int
    num_cached_tokens: int
    seconds: float
    details: dict[str, Any] = field(default_factory=dict)
