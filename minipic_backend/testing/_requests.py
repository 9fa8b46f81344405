"""The requests of a fake engine: which came, which run, which ended early."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from minipic_backend.errors import (
    ConfigurationError,
    EngineClosedError,
    EngineError,
    RequestAbortedError,
    shown,
)
from minipic_backend.prompt import Prompt
from minipic_backend.testing._layout import FakeSegment

__all__ = ["FakeCall", "RequestLog", "Running"]

_PATIENCE_S = 30.0


@dataclass(frozen=True)
class FakeCall:
    """A request that a `FakeEngine` got. `options` are those of the call, as given."""

    request_id: str
    prompt: Prompt
    options: Mapping[str, Any]


@dataclass
class Running:
    """A request on its way."""

    call: FakeCall
    segments: Sequence[FakeSegment]
    gathered: threading.Event
    started: float = field(default_factory=time.perf_counter)
    ended: threading.Event = field(default_factory=threading.Event)

    def wait(self, seconds: float) -> None:
        """Stand in for `seconds` of work, or until somebody aborts the request."""
        for pause in self._pauses(seconds):
            self.ended.wait(pause)

    async def await_(self, seconds: float) -> None:
        """`wait` without holding up the event loop; the abort may come from any thread."""
        for pause in self._pauses(seconds):
            await asyncio.sleep(pause)

    def _pauses(self, seconds: float) -> Iterator[float]:
        end = time.perf_counter() + seconds
        while not self.ended.is_set():
            left = end - time.perf_counter()
            if left < -_PATIENCE_S:
                raise EngineError("Too few requests ran together for gather=")
            if left <= 0 and self.gathered.is_set():
                return
            yield min(left, 0.01) if left > 0 else 0.005


class RequestLog:
    """Book-keeping, safe from any thread.

    Attributes:
        calls: every request, in the order of arrival.
        aborted: ids of requests that ended early.
        max_concurrency: the most requests that ever ran at once.
    """

    def __init__(self, gather: int) -> None:
        self._gather = gather
        self._gathered = threading.Event()
        self.calls: list[FakeCall] = []
        self.aborted: list[str] = []
        self.max_concurrency = 0
        self.closed = False
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._running: dict[str, Running] = {}

    @contextmanager
    def run(
        self, prompt: Prompt, segments: Sequence[FakeSegment], options: Mapping[str, Any]
    ) -> Iterator[Running]:
        """Admit a request, and strike it off however it ends."""
        request_id = options.get("request_id") or f"fake-{next(self._ids)}"
        running = Running(FakeCall(request_id, prompt, dict(options)), segments, self._gathered)
        with self._lock:
            self.check_open()
            if request_id in self._running:
                raise ConfigurationError(f"request_id={shown(request_id)} is already running")
            self.calls.append(running.call)
            self._running[request_id] = running
            self.max_concurrency = max(self.max_concurrency, len(self._running))
            if self.max_concurrency >= self._gather:
                self._gathered.set()
        try:
            yield running
        except BaseException:  # GeneratorExit and CancelledError too: the caller left
            self.aborted.append(request_id)
            raise
        finally:
            with self._lock:
                del self._running[request_id]

    def abort(self, request_id: str) -> None:
        with self._lock:
            if running := self._running.get(request_id):
                running.ended.set()

    def close(self) -> None:
        with self._lock:
            self.closed = True
            for running in self._running.values():
                running.ended.set()

    def check_open(self) -> None:
        if self.closed:
            raise EngineClosedError("This engine is closed")

    def check(self, running: Running) -> None:
        self.check_open()
        if running.ended.is_set():
            raise RequestAbortedError(f"Request {running.call.request_id} was aborted")
