"""One pool of connections to one server, and the requests under way on it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import uuid
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import CancelledError
from contextlib import aclosing, suppress
from typing import Any

import httpx

from minipic_backend.engines.driver import Delta, Handle
from minipic_backend.errors import (
    ConfigurationError,
    EngineClosedError,
    MiniPICError,
    PromptError,
    RequestAbortedError,
    shown,
)
from minipic_backend.remote.failures import as_ours
from minipic_backend.remote.loop import LoopThread
from minipic_backend.remote.retries import RETRIED_STATUS, Retries, may_retry, retry_after_s
from minipic_backend.remote.sse import deltas

__all__ = ["Transport"]

_CONNECT_S = 10.0
_END_S = 3.0
"""Seconds that a body may go on behind a whole answer; then its connection is dropped."""

_MAX_CONNECTIONS = 256
"""As many requests as vLLM runs together by default; further ones wait here for a connection."""

_JSON = {"content-type": "application/json"}
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class Transport:
    """Talks to one server from a thread of its own. Safe from any thread and event loop.

    Args:
        base_url: with its `/v1`.
        headers: of every request.
        timeout_s: seconds that the server may be silent; None: for ever.
        retries: how often to send again, and when.
        http: what carries the requests, instead of the network; for tests.
    """

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str],
        timeout_s: float | None,
        retries: Retries,
        http: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = dict(headers)
        self._timeout_s = timeout_s
        self._retries = retries
        self._http = http
        self._lock = threading.Lock()
        self._closed = False
        self._forget()

    @property
    def closed(self) -> bool:
        return self._closed

    # ---- any thread -------------------------------------------------------------------------

    def get(self, path: str) -> httpx.Response:
        """The answer to a GET, whatever its status (429 and 503 are tried again first).

        Raises:
            ServerUnreachableError, ServerTimeoutError: no answer.
            EngineClosedError: closed.
        """
        with self._lock:
            future = self._open().run(self._get(path))
        try:
            return future.result()
        except CancelledError:  # nobody cancels but `close`
            raise EngineClosedError("The engine was closed before the server answered") from None

    def start(
        self,
        body: Mapping[str, Any],
        *,
        request_id: str | None,
        num_prompt_tokens: int,
        block_size: int | None,
    ) -> Handle:
        """Sends a completion request, streamed; never blocks.

        Raises:
            EngineClosedError: closed.
            ConfigurationError: something that JSON cannot say.
        """
        handle = Handle(self, request_id or f"{self._prefix}-{next(self._ids)}")
        content = _encode({**body, "request_id": handle.request_id})

        def forget(task: asyncio.Task[None]) -> None:
            if task.cancelled():  # before it began, so that it could not say so
                handle.put(self._ended(handle.request_id))
            if self._tasks.get(handle.request_id) is task:
                del self._tasks[handle.request_id]

        def begin() -> None:
            if handle.request_id in self._tasks:
                handle.put(PromptError(f"request_id {shown(handle.request_id)} is already in use"))
                return
            stream = self._stream(content, num_prompt_tokens, block_size)
            task = asyncio.get_running_loop().create_task(self._serve(handle, stream))
            self._tasks[handle.request_id] = task
            task.add_done_callback(forget)

        with self._lock:  # so that it is begun before the loop can be told to end
            self._open().call(begin)
        return handle

    def abort(self, request_id: str) -> None:
        """Drops a request's connection, upon which the server stops; unknown ids are ignored."""
        if not isinstance(request_id, str):
            return

        def cancel() -> None:
            if task := self._tasks.get(request_id):
                task.cancel()

        with self._lock:
            if self._loop is not None and not self._closed and self._pid == os.getpid():
                self._loop.call(cancel)

    def close(self) -> None:
        """Ends all requests and connections. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            loop = self._loop
        if loop is not None and self._pid == os.getpid():
            loop.stop()

    # ---- life -------------------------------------------------------------------------------

    def _forget(self) -> None:
        """A state without thread and connections: the first, and that of a forked process."""
        self._pid = os.getpid()
        self._prefix = f"minipic-{uuid.uuid4().hex[:12]}"
        self._ids = itertools.count()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop: LoopThread | None = None
        self._client: httpx.AsyncClient | None = None

    def _open(self) -> LoopThread:
        """The loop, under the lock."""
        if self._closed:
            raise EngineClosedError("The engine is closed")
        if self._pid != os.getpid():
            self._forget()
        if self._loop is None:
            self._loop = LoopThread("minipic-remote", self._clean_up)
        return self._loop

    # ---- the loop's thread ------------------------------------------------------------------

    def _pool(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(
                headers=self._headers,
                timeout=httpx.Timeout(self._timeout_s, connect=_CONNECT_S, pool=None),
                limits=httpx.Limits(max_connections=_MAX_CONNECTIONS, keepalive_expiry=30.0),
                transport=self._http,
                # Proxies come from the environment, but never stand in front of this machine.
                mounts=None if self._http else {f"all://{host}": None for host in _LOOPBACK},
            )
        return self._client

    async def _get(self, path: str) -> httpx.Response:
        for attempt in itertools.count():
            try:
                response = await self._pool().get(self.base_url + path)
                if response.status_code in RETRIED_STATUS:
                    response.raise_for_status()
                return response
            except httpx.HTTPError as error:
                if may_retry(error) and attempt < self._retries.max_retries:
                    await asyncio.sleep(self._retries.delay_s(attempt, retry_after_s(error)))
                    continue
                raise as_ours(error, self.base_url) from error
        raise AssertionError("unreachable")

    async def _clean_up(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _serve(self, handle: Handle, stream: AsyncGenerator[Delta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    if not delta.finished:
                        handle.put(delta)
                        continue
                    self._tasks.pop(handle.request_id, None)
                    handle.put(delta)
                    await _read_to_end(stream)
        except asyncio.CancelledError:
            handle.put(self._ended(handle.request_id))
        except Exception as error:
            handle.put(as_ours(error, self.base_url))

    def _ended(self, request_id: str) -> MiniPICError:
        """Why a request was cancelled: nobody does that but `abort` and `close`."""
        if self._closed:
            return EngineClosedError("The engine was closed before the request finished")
        return RequestAbortedError(f"Request {shown(request_id)} was aborted")

    async def _stream(
        self, content: bytes, num_prompt_tokens: int, block_size: int | None
    ) -> AsyncGenerator[Delta, None]:
        """A request's deltas; sent again where it may, until the first token has come."""
        for attempt in itertools.count():
            begun = False
            try:
                async with self._pool().stream(
                    "POST", f"{self.base_url}/completions", content=content, headers=_JSON
                ) as response:
                    if response.is_error:
                        await response.aread()
                        response.raise_for_status()
                    news = deltas(
                        response.aiter_bytes(),
                        self.base_url,
                        num_prompt_tokens=num_prompt_tokens,
                        block_size=block_size,
                    )
                    async with aclosing(news):
                        async for delta in news:
                            begun = True
                            yield delta
                return
            except httpx.HTTPError as error:
                if begun or not may_retry(error) or attempt >= self._retries.max_retries:
                    raise
                await asyncio.sleep(self._retries.delay_s(attempt, retry_after_s(error)))


async def _read_to_end(stream: AsyncGenerator[Delta, None]) -> None:
    """Reads what is left behind a whole answer, without which its connection could not serve the
    next request. A server or a proxy may never end it: then the connection is worth nothing."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            async for _ in stream:
                pass


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"An option of the request is no JSON: {error}") from error
