"""KV cache events of prompts with spans: one for each segment, under the parent that it really has.

vLLM tells of a request's new blocks in one event, as if each block followed the one before it. A
span follows its frame, or nothing; a dependent segment follows no single block, so that its chain
starts anew. A router that follows parents then finds a span behind its prefix, wherever the span
stood, and never behind another document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from minipic_backend.config import SpanConfig
from minipic_backend.spans.segments import SegmentKind, SegmentTable

__all__ = ["Run", "event_runs", "stored_events"]


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks of one event that follow each other.

    Args:
        first: index of the first, in the prompt.
        end: index behind the last one.
        parent: index of the block that the first one follows; None where it follows none.
    """

    first: int
    end: int
    parent: int | None


def event_runs(table: SegmentTable, block_size: int, first: int, end: int) -> Iterator[Run]:
    """The blocks [first, end) of a prompt and what was generated behind it, by segment."""
    num_frame_blocks = table.num_frame_tokens // block_size
    bounds = [segment.start // block_size for segment in table.segments]
    kinds = [segment.kind for segment in table.segments]
    if kinds[-1] is SegmentKind.SPAN:  # generated tokens behind a lone span
        bounds.append(table.num_prompt_tokens // block_size)
        kinds.append(SegmentKind.DEPENDENT)
    for start, stop, kind in zip(bounds, [*bounds[1:], end], kinds, strict=True):
        lo, hi = max(start, first), min(stop, end)
        if lo >= hi:
            continue
        parent: int | None = lo - 1 if lo > start else None
        if lo == start and kind is SegmentKind.SPAN and num_frame_blocks:
            parent = num_frame_blocks - 1
        yield Run(lo, hi, parent)


def stored_events(
    event: Any,
    table: SegmentTable | None,
    first_block: int,
    hashes: Sequence[Any],
    config: SpanConfig,
) -> list[Any]:
    """A `BlockStored` of vLLM's, of any request, as the events that are true.

    Args:
        event: of blocks that follow each other in the request.
        table: the request's segments; None where its blocks do follow each other: ordinary
            prompts, and jobs for prefixes and spans.
        first_block: index of the event's first block in the request.
        hashes: of all blocks of the request, as events name them.
        config: block size, and the pad, which a job's tokens leave out.
    """
    size = config.block_size
    missing = len(event.block_hashes) * size - len(event.token_ids)
    if missing:
        event = structs.replace(event, token_ids=[*event.token_ids, *[config.pad] * missing])
    if table is None:
        return [event]
    events = []
    for run in event_runs(table, size, first_block, first_block + len(event.block_hashes)):
        part = slice(run.first - first_block, run.end - first_block)
        events.append(
            structs.replace(
                event,
                block_hashes=event.block_hashes[part],
                parent_block_hash=None if run.parent is None else hashes[run.parent],
                token_ids=event.token_ids[part.start * size : part.stop * size],
                extra_keys=event.extra_keys and event.extra_keys[part],
            )
        )
    return events
