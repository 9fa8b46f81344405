"""Internal requests: one missing part of a prompt, computed once for all who wait for it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from vllm import SamplingParams
from vllm.v1.request import Request

from minipic_backend.config import CONFIG_KEY, SpanFrame
from minipic_backend.plugin.parts import Part
from minipic_backend.spans.segments import SegmentKind, SegmentTable

__all__ = ["JOB_PREFIX", "JobMaker", "Promise", "SpanJob"]

JOB_PREFIX = "minipic-span-"
"""Of the ids of internal requests; vLLM gives every other request's id a random end."""


@dataclass(frozen=True, slots=True)
class Promise:
    """A request under way that will have published its first `num_blocks` blocks."""

    request: Any
    num_blocks: int


@dataclass(slots=True, eq=False)
class SpanJob:
    """One part being computed by an internal request.

    Args:
        key: hash of the part's last block, which fixes the part and its frame.
        request: vLLM's request: the ordinary prompt `frame + span`, a prefix, or a prompt up to the
            end of its dependent segment behind the prefix.
        num_frame_blocks: blocks in front of the part.
        num_missing: blocks of the part that were not cached when the job was made.
        frame: who computes what stands in front of the part, where it is not cached; to go first.
        table: segments that the request's blocks belong to; None where they follow each other.
        waiters: ids of the requests that wait for it.
    """

    key: bytes
    request: Any
    num_frame_blocks: int
    num_missing: int
    frame: Promise | None = None
    table: SegmentTable | None = None
    waiters: set[str] = field(default_factory=set)

    @property
    def promise(self) -> Promise:
        return Promise(self.request, len(self.request.block_hashes))

    @property
    def is_computed(self) -> bool:
        """Whether a step has been scheduled that computes its last token."""
        return self.ends_at(self.request.num_computed_tokens)

    def ends_at(self, num_tokens: int) -> bool:
        """Whether its work is done with so many tokens computed."""
        return bool(num_tokens >= self.request.num_prompt_tokens)


class JobMaker:
    """Makes internal requests out of the prompts that need them.

    Args:
        block_size: tokens in a block.
        with_pads: whether a span's pads are computed too. Nobody ever sees them.
    """

    def __init__(self, block_size: int, *, with_pads: bool) -> None:
        self._block_size = block_size
        self._with_pads = with_pads
        self._numbers = itertools.count()

    def make(
        self,
        waiter: Any,
        table: SegmentTable,
        part: Part,
        num_missing: int,
        frame: Promise | None,
    ) -> SpanJob:
        """A job for one part of a request's prompt, with the request's tenant and adapter.

        It takes the request's own block hashes: what it publishes is what the request looks up.
        """
        size = self._block_size
        if part.kind is SegmentKind.DEPENDENT:
            num_frame_blocks = part.first_block
        else:
            num_frame_blocks = table.num_frame_tokens // size if part.is_span else 0
        pieces = [(0, num_frame_blocks), (part.first_block, part.end_block)]
        tokens: list[int] = []
        hashes: list[bytes] = []
        for first, end in pieces:
            tokens += waiter.prompt_token_ids[first * size : end * size]
            hashes += waiter.block_hashes[first:end]
        # What ends in pads and is no span would be refused.
        if not self._with_pads or part.kind is SegmentKind.DEPENDENT:
            # Some token of the last block stays, even where that is all pads.
            del tokens[len(tokens) - min(part.num_pads, size - 1) :]
        request = Request(
            request_id=f"{JOB_PREFIX}{next(self._numbers)}",
            prompt_token_ids=tokens,
            sampling_params=_one_token(
                table.options.frame,
                table.options.seen_prefix if part.kind is SegmentKind.DEPENDENT else None,
            ),
            pooling_params=None,
            client_index=waiter.client_index,
            arrival_time=waiter.arrival_time,
            lora_request=waiter.lora_request,
            cache_salt=waiter.cache_salt,
            priority=waiter.priority,
        )
        request.block_hashes = hashes
        own_table = table if part.kind is SegmentKind.DEPENDENT else None
        return SpanJob(hashes[-1], request, num_frame_blocks, num_missing, frame, own_table)


@lru_cache(maxsize=64)
def _one_token(frame: SpanFrame, seen_prefix: int | None) -> SamplingParams:
    """Of a job: one token, which nobody reads."""
    options = {"frame": frame, "patches": (), "places": (), "seen_prefix": seen_prefix}
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        extra_args={CONFIG_KEY: options},
    )
