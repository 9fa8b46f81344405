"""A prompt laid out in tokens, for the engine and for people to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minipic_backend.results import Explanation, SegmentRow
from minipic_backend.spans.segments import SegmentKind, SegmentTable

__all__ = ["LaidOutPrompt", "LaidOutSegment", "explain_rows", "preview"]

_PREVIEW_LENGTH = 48


@dataclass(frozen=True, slots=True)
class LaidOutSegment:
    """What people see of a segment. `num_pads` counts the prefix's line breaks too."""

    label: str
    preview: str
    num_pads: int = 0


@dataclass(frozen=True, slots=True)
class LaidOutPrompt:
    """A prompt ready for the engine.

    Args:
        token_ids: the prompt, [num_tokens].
        table: its segments; None for an ordinary prompt.
        segments: one for each segment of the table; a single one for an ordinary prompt.
        notes: what the caller should know about this layout.
    """

    token_ids: tuple[int, ...]
    table: SegmentTable | None
    segments: tuple[LaidOutSegment, ...]
    notes: tuple[str, ...] = ()

    @property
    def num_positions(self) -> int:
        """Tokens, or logical positions where those are more (reserved ranges)."""
        position = self.table.generated_position if self.table else 0
        return max(len(self.token_ids), position)

    @property
    def num_pads(self) -> int:
        """Tokens that only fill up blocks."""
        return sum(segment.num_pads for segment in self.segments)

    @property
    def num_spans(self) -> int:
        """Documents laid out as spans: late ones do not count."""
        segments = self.table.segments if self.table else ()
        return sum(segment.kind is SegmentKind.SPAN for segment in segments)

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens of documents that are computed in context: patches, pads not counted."""
        segments = self.table.segments if self.table else ()
        return sum(s.num_tokens - s.num_pads for s in segments if s.replaced)

    @property
    def prefix_token_ids(self) -> tuple[int, ...]:
        """The prefix segment, whole blocks; empty where the prompt starts with a marker or is an
        ordinary one."""
        first = self.table.segments[0] if self.table else None
        return self.token_ids[: first.end] if first and first.kind is SegmentKind.PREFIX else ()


def explain_rows(
    laid_out: LaidOutPrompt, cached_tokens: Sequence[int] | None = None
) -> Explanation:
    """The table that `explain` prints.

    Args:
        laid_out: the prompt.
        cached_tokens: tokens of each segment that are in the cache; None where nobody can tell.
    """
    cached: Sequence[int | None] = cached_tokens or [None] * len(laid_out.segments)
    rows = []
    for index, (shown, num_cached) in enumerate(zip(laid_out.segments, cached, strict=True)):
        segment = laid_out.table.segments[index] if laid_out.table else None
        rows.append(
            SegmentRow(
                index=index,
                kind=segment.kind.value if segment else "prompt",
                label=shown.label,
                num_tokens=segment.num_tokens if segment else len(laid_out.token_ids),
                num_pads=shown.num_pads,
                offset=segment.offset if segment else 0,
                cached_tokens=num_cached,
                preview=shown.preview,
            )
        )
    return Explanation(tuple(rows), laid_out.token_ids, laid_out.notes)


def preview(text: str) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text[: 8 * _PREVIEW_LENGTH].split())
    return line if len(line) <= _PREVIEW_LENGTH else line[: _PREVIEW_LENGTH - 1] + "…"
