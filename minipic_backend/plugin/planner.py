"""What has to be computed before a request, by whom, and when the request may go.

A request whose turn comes is surveyed: which of its parts (prefix, spans) are cached, which are
being computed, which are missing. A missing part with anything useful behind it becomes a job,
since a request reads the cache up to the first miss only. Missing parts with nothing useful
behind them are left to the request itself, unless rows are plenty and their pads worth one:
computing them in place costs the same otherwise, and takes one row of a batch instead of several.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from minipic_backend.config import Policy
from minipic_backend.plugin.holds import Holds
from minipic_backend.plugin.parts import Part, prompt_parts
from minipic_backend.plugin.plan import Plan
from minipic_backend.plugin.seams import BlockCache
from minipic_backend.plugin.span_jobs import JobMaker, Promise, SpanJob
from minipic_backend.spans.figures import SpanFigures
from minipic_backend.spans.segments import SegmentKind, SegmentTable

__all__ = ["SpanPlanner"]

_MAX_ROUNDS = 2
"""How often a request gets jobs. What is then missing again, it computes in place."""

_MAX_STEPS_AHEAD = 2
"""Who waits for a part of a long prompt that is computed in place, in chunks, waits for all that
stands before it: for no more than so many steps."""


class SpanPlanner:
    """Plans jobs for requests, and keeps what they need in the cache until they have it.

    Args:
        policy: see `SpanConfig`; may be changed between steps.
        cache: vLLM's block cache.
        holds: blocks kept for requests that wait.
        block_size: tokens in a block.
        step_tokens: the most tokens that one prompt may have computed in a step.
        host_memory: blocks may also come from, and go to, memory behind this cache. A request
            cannot tell which parts it would find there: every missing part becomes a job; and
            what goes there has to be whole blocks.
    """

    def __init__(
        self,
        policy: Policy,
        cache: BlockCache,
        holds: Holds,
        block_size: int,
        step_tokens: int,
        *,
        host_memory: bool = False,
    ) -> None:
        self.policy = policy
        self._cache = cache
        self.holds = holds
        self._block_size = block_size
        self._max_ahead = _MAX_STEPS_AHEAD * step_tokens
        self._all_parts = host_memory
        self.min_tail_tokens: float = math.inf
        """From how many tokens on a missing span is worth a job even with nothing useful behind it:
        for the pads that the job leaves out, at the price of a row of the batch."""
        self._maker = JobMaker(block_size, with_pads=host_memory)
        self._plans: dict[str, Plan] = {}
        self._jobs: dict[bytes, SpanJob] = {}
        self._by_id: dict[str, SpanJob] = {}
        self._in_place: dict[bytes, Promise] = {}

    # ---- before a request -------------------------------------------------------------------

    def plan(self, request: Any, table: SegmentTable) -> list[SpanJob]:
        """What has to go before a request whose turn has come; often nothing.

        Args:
            request: at the front of the queue, with nothing computed.
            table: its segments.
        """
        plan = self._plans.get(request.request_id)
        if plan is None or plan.admitted:  # its first turn, or it was preempted
            self._drop(request.request_id)
            parts = prompt_parts(table, self._block_size)
            plan = Plan(request, table, parts, time.monotonic())
            self._plans[request.request_id] = plan
        elif plan.waits_for and (not self._settled(plan) or self._all_kept(plan)):
            return []
        if self.policy == "in_place" or plan.rounds >= _MAX_ROUNDS:
            plan.waits_for.clear()
            return []
        return self._make_jobs(plan)

    def plan_round(self, requests: Iterable[tuple[Any, SegmentTable]], room: int) -> list[SpanJob]:
        """Jobs for all of the requests, in order, as far as their blocks fit into `room`."""
        jobs: list[SpanJob] = []
        for request, table in requests:
            room -= len(request.block_hashes)
            if jobs and room < 0:
                break
            jobs += self.plan(request, table)
        return jobs

    def may_go(self, request: Any, *, plannable: bool) -> bool:
        """Whether all that a request or a job waits for is published, or will never be.

        Args:
            request: to be scheduled.
            plannable: whether it is one that may wait for spans.
        """
        job = self._by_id.get(request.request_id)
        if job is not None:
            return job.frame is None or self._is_settled(job.frame)
        if self.policy == "batched" and self._by_id:
            return not plannable
        plan = self._plans.get(request.request_id)
        return plan is None or plan.admitted or self._settled(plan)

    def _make_jobs(self, plan: Plan) -> list[SpanJob]:
        found = self._survey(plan)
        useful = self._last_useful(plan, found)
        waits_for: list[Promise] = []
        jobs: list[SpanJob] = []
        held: list[Any] = []
        prefix: Promise | None = None
        for index, part in enumerate(plan.parts[: len(found)]):
            key = plan.key(part)
            blocks = found[index]
            if len(blocks) == part.num_blocks:
                held += blocks
                continue
            promise = self._promise_of(key)
            if promise is not None:
                job = self._jobs.get(key)
                if job is not None and plan.request.request_id not in job.waiters:
                    job.waiters.add(plan.request.request_id)
                    plan.jobs.append(job)
                if key not in plan.own:
                    plan.shared.add(key)
            elif index < useful and part.can_be_a_job:
                num_missing = part.num_blocks - len(blocks)
                needs_prefix = plan.table.num_frame_tokens or part.kind is SegmentKind.DEPENDENT
                frame = prefix if needs_prefix else None
                job = self._maker.make(plan.request, plan.table, part, num_missing, frame)
                job.waiters.add(plan.request.request_id)
                self._jobs[key] = self._by_id[job.request.request_id] = job
                plan.jobs.append(job)
                plan.own[key] = num_missing
                jobs.append(job)
                promise = job.promise
            elif part.can_be_a_job and key not in self._in_place:
                self._in_place[key] = Promise(plan.request, part.end_block)
                plan.promised.append(key)
            if promise is not None:
                waits_for.append(promise)
                if part.kind is SegmentKind.PREFIX:
                    prefix = promise
        plan.waits_for = waits_for
        if jobs:
            plan.rounds += 1
        if waits_for:
            # What is cached now must not be evicted by what is computed for the same request.
            self.holds.add(plan.request.request_id, held)
        return jobs

    def _survey(self, plan: Plan) -> list[list[Any]]:
        """Cached blocks of each part, up to and with the first that only the request can compute
        and that is not cached as a whole."""
        found: list[list[Any]] = []
        for part in plan.parts:
            blocks = self._cache.leading(
                plan.request.block_hashes[part.first_block : part.end_block]
            )
            found.append(blocks)
            if not part.can_be_a_job and len(blocks) < part.num_blocks:
                break
        return found

    def _last_useful(self, plan: Plan, found: list[list[Any]]) -> int:
        """Index of the last part of which something can be read, not computed."""
        last = -1
        seen: set[bytes] = set()
        for index, blocks in enumerate(found):
            part = plan.parts[index]
            key = plan.key(part)
            if blocks or key in seen or self._promise_of(key) is not None:
                last = index
            elif part.is_span and self._is_worth_a_job(part):
                last = index + 1
            seen.add(key)
        return last

    def _is_worth_a_job(self, part: Part) -> bool:
        """Whether a missing span becomes a job whatever stands behind it."""
        if self._all_parts or self.policy == "batched":
            return True
        size = self._block_size
        return 4 * part.num_pads >= size and part.num_blocks * size >= self.min_tail_tokens

    def _promise_of(self, key: bytes) -> Promise | None:
        """Who computes a part just now, and soon has it."""
        job = self._jobs.get(key)
        if job is not None:
            return job.promise
        promise = self._in_place.get(key)
        if promise is None or not self._cache.is_running(promise.request):
            return None
        num_left = promise.num_blocks - self._cache.num_published(promise.request)
        return promise if num_left * self._block_size <= self._max_ahead else None

    def _is_settled(self, promise: Promise) -> bool:
        request = promise.request
        if request.is_finished() or self._cache.num_published(request) >= promise.num_blocks:
            return True
        # A job in the queue will run; a request that was preempted may wait for this one.
        return request.request_id not in self._by_id and not self._cache.is_running(request)

    def _settled(self, plan: Plan) -> bool:
        return all(map(self._is_settled, plan.waits_for))

    def _all_kept(self, plan: Plan) -> bool:
        return all(
            len(self._cache.leading(plan.request.block_hashes[p.first_block : p.end_block]))
            == p.num_blocks
            for p in plan.parts
            if plan.key(p) in plan.own or plan.key(p) in plan.shared
        )

    # ---- after a step was scheduled ---------------------------------------------------------

    def job(self, request_id: str) -> SpanJob | None:
        """The job that an internal request's id belongs to."""
        return self._by_id.get(request_id)

    @property
    def num_jobs(self) -> int:
        return len(self._by_id)

    def plan_of(self, request_id: str) -> Plan | None:
        return self._plans.get(request_id)

    def jobs_of(self, request_id: str) -> list[SpanJob]:
        """The jobs under way that a request waits for."""
        plan = self._plans.get(request_id)
        jobs = plan.jobs if plan is not None else []
        return [job for job in jobs if job.request.request_id in self._by_id]

    def allocated(self, request: Any, num_tokens: int) -> None:
        """A request's first `num_tokens` tokens are computed by the end of this step."""
        job = self._by_id.get(request.request_id)
        if job is not None and job.ends_at(num_tokens):
            # Its last block as well, which ends in pads that it does not compute.
            self._cache.publish(request, len(request.block_hashes) * self._block_size)

    def note_loaded(self, job: SpanJob) -> None:
        """What a job found in host memory was not computed for those who wait."""
        stats = job.request.prefill_stats
        loaded = stats.num_external_cached_tokens // self._block_size if stats is not None else 0
        for request_id in job.waiters if loaded else ():
            plan = self._plans.get(request_id)
            if plan is not None and job.key in plan.own:
                plan.own[job.key] = max(plan.own[job.key] - loaded, 0)

    def computed(self, job: SpanJob) -> None:
        """A step was scheduled that completes the job; its blocks stay for those who wait."""
        blocks = self._cache.blocks_of(job.request)[job.num_frame_blocks :]
        for request_id in job.waiters:
            plan = self._plans.get(request_id)
            if plan is not None and not plan.admitted:
                self.holds.add(request_id, blocks)
        self.forget_job(job)

    def forget_job(self, job: SpanJob) -> None:
        self._jobs.pop(job.key, None)
        self._by_id.pop(job.request.request_id, None)

    def admitted(self, plan: Plan, num_cached_tokens: int) -> SpanFigures:
        """A request was admitted, with so many tokens read from the cache: the first chunk of its
        prompt is in the step that was just scheduled."""
        plan.admitted = True
        self.holds.release(plan.request.request_id)
        return plan.figures(num_cached_tokens, self._block_size)

    def prefilled(self, plan: Plan) -> None:
        """The last chunk of a request's prompt was scheduled."""
        self._drop(plan.request.request_id)

    def left(self, request_id: str) -> list[SpanJob]:
        """A request has ended: the jobs that nobody waits for any more."""
        plan = self._plans.get(request_id)
        jobs = plan.jobs if plan is not None and not plan.admitted else []
        self._drop(request_id)
        for job in jobs:
            job.waiters.discard(request_id)
        return [job for job in jobs if not job.waiters and job.request.request_id in self._by_id]

    def _drop(self, request_id: str) -> None:
        plan = self._plans.pop(request_id, None)
        if plan is not None:
            self.holds.release(request_id)
            for key in plan.promised:
                del self._in_place[key]
