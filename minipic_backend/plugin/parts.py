"""The parts of a prompt that the cache may hold, as runs of whole blocks."""

from __future__ import annotations

from dataclasses import dataclass

from minipic_backend.spans.segments import SegmentKind, SegmentTable

__all__ = ["Part", "prompt_parts"]


@dataclass(frozen=True, slots=True)
class Part:
    """A segment's whole blocks, [first_block, end_block) of the prompt, pads included.

    Args:
        can_be_a_job: whether it can be computed without the rest of its prompt, or with no more of
            it than the prefix.
    """

    kind: SegmentKind
    first_block: int
    end_block: int
    num_pads: int
    can_be_a_job: bool

    @property
    def num_blocks(self) -> int:
        return self.end_block - self.first_block

    @property
    def is_span(self) -> bool:
        return self.kind is SegmentKind.SPAN


def prompt_parts(table: SegmentTable, block_size: int) -> tuple[Part, ...]:
    """The parts of a prompt in order; tokens behind the last whole block belong to none."""
    parts = []
    for index, segment in enumerate(table.segments):
        first, end = segment.start // block_size, segment.end // block_size
        if end > first:
            can_be_a_job = segment.kind is not SegmentKind.DEPENDENT or (
                index == 1 and _is_behind_prefix(table, block_size)
            )
            parts.append(Part(segment.kind, first, end, segment.num_pads, can_be_a_job))
    return tuple(parts)


def _is_behind_prefix(table: SegmentTable, block_size: int) -> bool:
    """Whether segment 1 is a prompt of its own together with the prefix, and not a question: a
    system prompt behind a universal frame."""
    prefix, segment = table.segments[:2]
    return (
        prefix.kind is SegmentKind.PREFIX
        and len(table.segments) > 2
        and not segment.is_placed
        and segment.num_pads < block_size
    )
