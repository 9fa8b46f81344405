"""vLLM's queues of waiting requests, with a word before a request is considered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue
from vllm.v1.request import Request

__all__ = ["SpanFCFSQueue", "SpanPriorityQueue", "span_queue"]

Before = Callable[[Any], list[Any]]
"""Given the request at the front, what has to go before it."""

_TICK_S = 1e-6
"""Between the arrival times of jobs and that of their request: larger than the step of a float."""


class SpanFCFSQueue(FCFSRequestQueue):
    """First come, first served."""

    before: Before

    def peek_request(self) -> Request:
        """The request to be scheduled next: a job that the one at the front needs, or that one."""
        head = super().peek_request()
        if jobs := self.before(head):
            self.extendleft(reversed(jobs))
            return jobs[0]
        return head


class SpanPriorityQueue(PriorityRequestQueue):
    """By priority, then by arrival."""

    before: Before

    def peek_request(self) -> Request:
        """The request to be scheduled next: a job that the one at the front needs, or that one."""
        head = super().peek_request()
        jobs = self.before(head)
        for place, job in enumerate(jobs):
            job.arrival_time = head.arrival_time - (len(jobs) - place) * _TICK_S
            self.add_request(job)
        return super().peek_request()

    def hurry(self, job: Request, request: Request) -> None:
        """Puts a job that a more urgent request waits for right in front of that one."""
        try:
            self.remove_request(job)
        except ValueError:  # running, or passed over in this step: it comes back by itself
            job.priority = request.priority
            return
        job.priority = request.priority
        job.arrival_time = min(job.arrival_time, request.arrival_time - _TICK_S)
        self.add_request(job)


def span_queue(stock: Any, before: Before) -> Any:
    """An empty queue like vLLM's own `stock`."""
    queue = (SpanPriorityQueue if isinstance(stock, PriorityRequestQueue) else SpanFCFSQueue)()
    queue.before = before
    return queue
