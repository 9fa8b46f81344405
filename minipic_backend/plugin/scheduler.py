"""The scheduler: computes missing spans ahead of the prompts that need them.

vLLM publishes a request's blocks when it schedules their computation, so that a request behind it
in the queue reads them in the very same step. All there is to do is therefore to put a request's
jobs right in front of it, when its turn comes, and to keep it back while they are unfinished.
`planner.py` decides, this file carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request, RequestStatus

from minipic_backend.config import CONFIG_KEY
from minipic_backend.plugin import seams
from minipic_backend.plugin.hashing_scheduler import SpanHashing
from minipic_backend.plugin.holds import Holds
from minipic_backend.plugin.kv_events import stored_events
from minipic_backend.plugin.metrics import SpanCounts
from minipic_backend.plugin.plan import Plan
from minipic_backend.plugin.planner import SpanPlanner
from minipic_backend.plugin.queues import SpanPriorityQueue, span_queue
from minipic_backend.plugin.span_jobs import JOB_PREFIX, SpanJob
from minipic_backend.spans.figures import SpanFigures
from minipic_backend.spans.hashing import SpanHashChain
from minipic_backend.spans.segments import SegmentTable

__all__ = ["AsyncSpanScheduler", "SpanScheduler"]


_WAITING = (
    RequestStatus.WAITING,
    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    RequestStatus.PREEMPTED,
)


class _SpanScheduling(SpanHashing):
    """Jobs for the missing spans of a scheduler's requests."""

    _tail_jobs = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        seams.share_interpreter()
        pool = self.kv_cache_manager.block_pool
        self.holds = Holds(pool, int(self.span_config.hold_share * pool.num_gpu_blocks))
        self.block_cache = seams.BlockCache(self.kv_cache_manager)
        self.planner = SpanPlanner(
            self.span_config.policy,
            self.block_cache,
            self.holds,
            self.span_config.block_size,
            self._step_tokens(),
            host_memory=self.connector is not None,
        )
        self.span_figures: dict[str, SpanFigures] = {}
        self.span_counts = SpanCounts()
        stock_queue: Any = self.waiting
        self.waiting: Any = span_queue(stock_queue, self._before)
        seams.watch_allocations(
            self.kv_cache_manager, self.holds.release_all, self.planner.allocated
        )
        seams.adapt_cache_stats(self.kv_cache_manager, _is_internal, self._num_own)
        seams.adapt_stored_events(pool, self._stored_events)
        self.install_hasher()

    # ---- requests ---------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if _is_internal(request):
            # Such ids are not for others. Never scheduled.
            request.abort_immediately = True
        super().add_request(request)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self.span_figures.pop(request.request_id, None)
        self._end_jobs_of(request.request_id for request in finished)
        return [request for request in finished if not self._ended(request)]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self.holds.release_all()
        return bool(super().reset_prefix_cache(*args, **kwargs))

    # ---- a step -----------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        plans: list[Plan] = []
        jobs: list[SpanJob] = []
        for request_id in output.num_scheduled_tokens:
            plan = self.planner.plan_of(request_id)
            if plan is not None:
                plans.append(plan)
            elif self.planner.num_jobs:
                job = self.planner.job(request_id)
                if job is not None and job.is_computed:
                    self.planner.note_loaded(job)
                    jobs.append(job)
        for plan in plans:
            if not plan.admitted:
                self._admitted(plan)
            if not plan.request.is_prefill_chunk:
                self.planner.prefilled(plan)
        for job in jobs:
            self.planner.computed(job)
        if self.connector is None:
            # Nobody needs their sampled token: their rows are free for the next step. A connector
            # is still to store what they compute, and lets them end by themselves.
            self._end(jobs)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        ended: list[str] = []
        for of_client in outputs.values():
            if of_client.finished_requests:
                of_client.finished_requests = {
                    i for i in of_client.finished_requests if not i.startswith(JOB_PREFIX)
                }
            if self.connector is not None:
                of_client.outputs = [
                    one for one in of_client.outputs if not one.request_id.startswith(JOB_PREFIX)
                ]
            for one in of_client.outputs:
                if one.finish_reason is not None:
                    ended.append(one.request_id)
                    figures = self.span_figures.pop(one.request_id, None)
                    if figures is not None and one.kv_transfer_params is None:
                        # vLLM's only way for a dict from the scheduler to whoever asked.
                        one.kv_transfer_params = {CONFIG_KEY: figures.to_dict()}
        self._end_jobs_of(ended)
        return outputs

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            self.span_counts.take_into(stats)
        if stats is not None and (self.planner.num_jobs or self.connector is not None):
            for name, request in self.requests.items():
                if not name.startswith(JOB_PREFIX) or request.is_finished():
                    continue
                if request.status == RequestStatus.RUNNING:
                    stats.num_running_reqs -= 1
                elif request in self.deferred_waiting:
                    stats.num_skipped_waiting_reqs -= 1
                else:
                    stats.num_waiting_reqs -= 1
        return stats

    def _before(self, request: Request) -> list[Request]:
        """What has to go before the request whose turn it is."""
        table = self._plannable(request)
        if table is None:
            return []
        if self._tail_jobs:
            # At twice that size, a step is full of tokens before it is full of rows.
            rows = self.max_num_running_reqs
            self.planner.min_tail_tokens = 2 * self.max_num_scheduled_tokens / rows
        if self.planner.policy == "batched":
            if self.planner.num_jobs or self.planner.plan_of(request.request_id) is not None:
                return []
            jobs = self.planner.plan_round(
                (
                    (one, found)
                    for one in self.waiting
                    if self.planner.plan_of(one.request_id) is None
                    and (found := self._plannable(one)) is not None
                ),
                self.kv_cache_manager.block_pool.get_num_free_blocks(),
            )
        else:
            jobs = self.planner.plan(request, table)
        if isinstance(self.waiting, SpanPriorityQueue):
            for job in self.planner.jobs_of(request.request_id):
                if job.request.priority > request.priority:
                    self.waiting.hurry(job.request, request)
        for job in jobs:
            self.requests[job.request.request_id] = job.request
            if self.connector is not None:
                self.connector.on_new_request(job.request)
        if jobs and self.log_stats:
            missing = sum(job.num_missing for job in jobs)
            self.span_counts.add_jobs(len(jobs), missing * self.block_size)
        return [job.request for job in jobs]

    def _plannable(self, request: Request) -> SegmentTable | None:
        """The segments of a request that may wait for spans; None for any other."""
        self.prepare(request)
        chain = getattr(request, "minipic_chain", None)
        if (
            not isinstance(chain, SpanHashChain)
            or request.num_computed_tokens
            or request.skip_reading_prefix_cache
            or request.status not in _WAITING
            # Preempted, and still to get tokens, the last one perhaps: vLLM passes it over.
            or (request.num_stale_output_tokens and not request.drop_stale_output)
        ):
            return None
        return chain.table

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        return bool(
            super()._handle_blocked_waiting_request(request)
            and self.planner.may_go(request, plannable=self._plannable(request) is not None)
        )

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        # It may have been scheduled in this very step, by priority: then what vLLM published of it
        # will not be computed after all.
        self.block_cache.unpublish(request)
        super()._preempt_request(request, *args, **kwargs)

    def _admitted(self, plan: Plan) -> None:
        request = plan.request
        stats = request.prefill_stats
        first = stats is not None and request.num_preemptions == 0
        figures = self.planner.admitted(plan, stats.num_cached_tokens if first else 0)
        if first:
            self.span_figures[request.request_id] = figures
            if self.log_stats:
                self.span_counts.admitted(figures)
            # What its own jobs computed was computed for this request, not found.
            own = plan.own_tokens(stats.num_local_cached_tokens, self.block_size)
            stats.set(
                num_prompt_tokens=stats.num_prompt_tokens,
                num_local_cached_tokens=stats.num_local_cached_tokens - own,
                num_external_cached_tokens=stats.num_external_cached_tokens,
            )

    def _num_own(self, request: Request, num_hits: int) -> int:
        """What of a request's hits its own jobs computed; asked for when it is admitted."""
        plan = self.planner.plan_of(request.request_id)
        if plan is None or plan.admitted:
            return 0
        return plan.own_tokens(num_hits, self.block_size)

    def _step_tokens(self) -> int:
        """The most tokens that one prompt may have computed in a step."""
        threshold = self.scheduler_config.long_prefill_token_threshold
        return int(min(threshold or math.inf, self.max_num_scheduled_tokens))

    # ---- jobs -------------------------------------------------------------------------------

    def _end_jobs_of(self, request_ids: Iterable[str]) -> None:
        """Cancels the jobs that nobody waits for once these requests have ended."""
        orphans: dict[str, SpanJob] = {}
        for request_id in request_ids:
            for job in self.planner.left(request_id):
                orphans[job.request.request_id] = job
        for job in orphans.values():
            self.planner.forget_job(job)
        self._end(list(orphans.values()))

    def _end(self, jobs: list[SpanJob]) -> None:
        if jobs:
            ids = [job.request.request_id for job in jobs]
            super().finish_requests(ids, RequestStatus.FINISHED_ABORTED)

    def _ended(self, request: Request) -> bool:
        """Takes an internal request that vLLM ended off the books; False for any other."""
        job = self.planner.job(request.request_id)
        if job is not None:
            self.planner.forget_job(job)
        return _is_internal(request)

    def _stored_events(
        self, event: Any, request: Request, first_block: int, hashes: list[Any]
    ) -> list[Any]:
        chain = getattr(request, "minipic_chain", None)
        table = chain.table if isinstance(chain, SpanHashChain) else None
        job = self.planner.job(request.request_id)
        if job is not None:
            table = job.table
        return stored_events(event, table, first_block, hashes, self.span_config)


class SpanScheduler(_SpanScheduling):
    """For platforms that schedule one step at a time (CPU)."""


class AsyncSpanScheduler(_SpanScheduling, AsyncScheduler):
    """For platforms that schedule ahead (CUDA): vLLM requires a subclass of its own class.

    Rows are cheap there, and planned while the device computes: see `SpanPlanner.min_tail_tokens`.
    """

    _tail_jobs = True


def _is_internal(request: Any) -> bool:
    return bool(request.request_id.startswith(JOB_PREFIX))
