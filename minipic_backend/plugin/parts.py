"""The parts of a prompt that the cache may hold, as runs of whole blocks."""

from __future__ import annotations

from dataclasses import dataclass

from minipic_backend.spans.segments import SegmentKind, SegmentTable

__all__ = ["Part", "prompt_parts"]


@dataclass(frozen=True, slots=True)
class Part:
    """A segment's whole blocks, [first_block, end_block) of the prompt, pads included."""

    kind: SegmentKind
    first_block: int
    end_block: int
    num_pads: int

    @property
    def num_blocks(self) -> int:
        return self.end_block - self.first_block

    @property
    def is_span(self) -> bool:
        return self.kind is SegmentKind.SPAN

    @property
    def can_be_a_job(self) -> bool:
        """Whether it can be computed without the rest of its prompt."""
        return self.kind is not SegmentKind.DEPENDENT


def prompt_parts(table: SegmentTable, block_size: int) -> tuple[Part, ...]:
    """The parts of a prompt in order; tokens behind the last whole block belong to none."""
    parts = []
    for segment in table.segments:
        first, end = segment.start // block_size, segment.end // block_size
        if end > first:
            parts.append(Part(segment.kind, first, end, segment.num_pads))
    return tuple(parts)
