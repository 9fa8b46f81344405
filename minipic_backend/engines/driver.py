"""Owns one vLLM engine and the only thread that talks to it.

Callers on any thread or event loop hand over requests; the thread steps the engine while there
is work and sleeps otherwise. Nothing here knows spans.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from minipic_backend.config import CONFIG_KEY
from minipic_backend.errors import (
    ConfigurationError,
    EngineClosedError,
    EngineError,
    EngineStartError,
    MiniPICError,
    PromptError,
    RequestAbortedError,
    shown,
)
from minipic_backend.plugin import seams
from minipic_backend.spans.figures import SpanFigures

__all__ = ["Aborts", "Delta", "EngineDriver", "Handle"]

_T = TypeVar("_T")
_start_lock = threading.Lock()
_live_inline: set[int] = set()
"""Engines of this process that share torch's process groups; the last to go tears them down."""


class FairLock:
    """A lock that goes to whoever has waited longest: one who gives it back and wants it again at
    once comes last."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._queue: deque[threading.Lock] = deque()  # the holder's first

    def __enter__(self) -> None:
        turn = threading.Lock()
        turn.acquire()
        with self._mutex:
            self._queue.append(turn)
            if len(self._queue) == 1:
                return
        turn.acquire()

    def __exit__(self, *args: object) -> None:
        with self._mutex:
            self._queue.popleft()
            if self._queue:
                self._queue[0].release()


_inline_model = FairLock()
"""Held while an engine of this process runs its model: vLLM keeps what a model's layers look up
(`vllm.forward_context`) in one place for the whole process, where a second engine on its own thread
would find the first one's."""


@dataclass(frozen=True, slots=True)
class Delta:
    """One step's news of a request; `finished` closes it."""

    outputs: Sequence[Any]
    finished: bool
    num_cached_tokens: int | None
    num_cache_creation_tokens: int | None
    at: float
    spans: SpanFigures | None = None


class Aborts(Protocol):
    """Whatever runs requests: an engine's driver, or a server's client."""

    def abort(self, request_id: str) -> None: ...


class Handle:
    """A request under way: read `deltas` from a thread, or `adeltas` or `all_deltas` from an event
    loop, once.

    Closing a generator early aborts the request.
    """

    def __init__(self, driver: Aborts, request_id: str) -> None:
        self.request_id = request_id
        self.submitted_at = time.perf_counter()
        self._driver = driver
        self._items: queue.SimpleQueue[Delta | BaseException] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wakeup: asyncio.Event | None = None
        self._wakes_at_end_only = False
        self._done = False

    def put(self, item: Delta | BaseException) -> None:
        """Called on the thread that runs the request."""
        if self._done:
            return
        self._done = isinstance(item, BaseException) or item.finished
        self._items.put(item)
        if self._wakes_at_end_only and not self._done:
            return
        loop, wakeup = self._loop, self._wakeup
        if loop is not None and wakeup is not None:
            # A loop that was closed meanwhile has nobody left to wake.
            try:
                loop.call_soon_threadsafe(wakeup.set)
            except RuntimeError:
                self._driver.abort(self.request_id)

    def deltas(self) -> Generator[Delta, None, None]:
        try:
            while True:
                item = self._items.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.finished:
                    return
        finally:
            self._leave()

    async def adeltas(self) -> AsyncGenerator[Delta, None]:
        self._wakeup = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    item = self._items.get_nowait()
                except queue.Empty:
                    self._wakeup.clear()
                    if self._items.empty():
                        await self._wakeup.wait()
                    continue
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.finished:
                    return
        finally:
            self._loop = None
            self._leave()

    async def all_deltas(self) -> list[Delta]:
        """Every delta, once the request has finished. The event loop is woken once, not with
        every step of the engine; cancelling this aborts the request."""
        self._wakes_at_end_only = True
        self._wakeup = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        try:
            if not self._done:
                await self._wakeup.wait()
            deltas: list[Delta] = []
            while not (deltas and deltas[-1].finished):
                item = self._items.get()
                if isinstance(item, BaseException):
                    raise item
                deltas.append(item)
            return deltas
        finally:
            self._loop = None
            self._leave()

    def _leave(self) -> None:
        if not self._done:
            self._driver.abort(self.request_id)


class _EngineThread(threading.Thread):
    """Talks to one engine."""


class EngineDriver:
    """A vLLM engine behind a thread.

    Args:
        engine_args: keyword arguments of vLLM's `EngineArgs`.
        separate_process: run the engine core in a process of its own. The script then needs
            `if __name__ == "__main__":`, since Python starts that process by importing it.

    Raises:
        EngineStartError: vLLM did not start; the cause is chained.
    """

    def __init__(self, engine_args: Mapping[str, Any], *, separate_process: bool = False) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._handles: dict[str, Handle] = {}
        self._engine_ids: dict[str, str] = {}
        self._ids = itertools.count()
        self._closing = False
        self._close_lock = threading.Lock()
        self._separate_process = separate_process
        self._llm: Any = None
        started: Future[None] = Future()
        self._thread = _EngineThread(
            target=self._run,
            args=(dict(engine_args), started),
            name="minipic-engine",
            daemon=True,
        )
        self._thread.start()
        started.result()

    # ---- any thread -------------------------------------------------------------------------

    @property
    def llm(self) -> Any:
        """vLLM's `LLMEngine`; only for reading, or inside `call`."""
        return self._llm

    @property
    def closed(self) -> bool:
        return self._closing

    def submit(
        self,
        token_ids: Sequence[int],
        sampling_params: Any,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        request_id: str | None = None,
        adapter: Any = None,
    ) -> Handle:
        """Queues one prompt of token ids; never blocks. `adapter`: vLLM's `LoRARequest`.

        Raises:
            EngineClosedError: the engine was closed.
            PromptError: `request_id` is already in use.
        """
        handle = Handle(self, request_id or f"minipic-{next(self._ids)}")
        prompt: dict[str, Any] = {"prompt_token_ids": list(token_ids)}
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt

        def add() -> None:
            if handle.request_id in self._handles:
                handle.put(PromptError(f"request_id {shown(handle.request_id)} is already in use"))
                return
            try:
                (engine_input,) = self._llm.renderer.render_cmpl([prompt])
                self._handles[handle.request_id] = handle
                self._engine_ids[handle.request_id] = self._llm.add_request(
                    handle.request_id,
                    engine_input,
                    sampling_params,
                    lora_request=adapter,
                    priority=priority,
                )
            except Exception as error:
                if seams.is_engine_death(error):
                    raise  # told to all requests, this one too
                handle.put(_as_ours(error))
                if self._handles.pop(handle.request_id, None) is not None:
                    # vLLM may have noted it down before it refused.
                    self._llm.abort_request([handle.request_id])

        self._send(add)
        return handle

    def abort(self, request_id: str) -> None:
        """Aborts a request; unknown and finished ones are ignored."""
        if not isinstance(request_id, str):
            return  # unknown

        def do() -> None:
            handle = self._handles.pop(request_id, None)
            if handle is None:
                return
            # Told first: vLLM raises where its process has ended.
            handle.put(RequestAbortedError(f"Request {shown(request_id)} was aborted"))
            engine_id = self._engine_ids.pop(request_id, None)
            if engine_id is not None:
                self._llm.abort_request([engine_id], internal=True)

        if not self._closing:
            self._commands.put(do)

    def call(self, function: Callable[[Any], _T]) -> _T:
        """Runs `function(llm)` on the engine's thread, between steps, and returns its value."""
        future: Future[_T] = Future()

        def do() -> None:
            try:
                future.set_result(function(self._llm))
            except BaseException as error:
                if seams.is_engine_death(error):
                    future.set_exception(_stopped(error))
                    raise
                future.set_exception(error)

        self._send(do)
        return future.result()

    def close(self) -> None:
        """Stops the engine and frees its memory; requests under way fail. Safe to call twice, and
        from a collection of garbage on any thread."""
        with self._close_lock:
            if not self._closing:
                self._closing = True
                self._commands.put(None)
        # Another engine's thread may hold what this one's waits for.
        if not isinstance(threading.current_thread(), _EngineThread):
            self._thread.join()

    def _send(self, command: Callable[[], None]) -> None:
        with self._close_lock:
            if self._closing:
                raise EngineClosedError("The engine is closed")
            self._commands.put(command)

    # ---- the engine's thread ----------------------------------------------------------------

    def _run(self, engine_args: dict[str, Any], started: Future[None]) -> None:
        try:
            self._llm = self._start(engine_args)
        except BaseException as error:
            self._closing = True
            if not self._separate_process:
                _tear_down_groups()
            started.set_exception(_start_error(error))
            return
        started.set_result(None)
        end: EngineError = EngineClosedError("The engine was closed before the request finished")
        try:
            while self._take_commands():
                if self._handles:
                    self._step()
        except BaseException as error:
            end = _stopped(error)
        with self._close_lock:
            self._closing = True  # first: who is told of the end finds it closed
        try:
            self._fail(end)
        finally:
            self._stop()

    def _start(self, engine_args: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        separate = self._separate_process
        # One at a time: vLLM's CPU platform reads the mode from the environment.
        mode = _environment("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(separate)))
        with _start_lock, mode, seams.modules_with_odd_objects():
            config = EngineArgs(**engine_args).create_engine_config()
            if config.kv_transfer_config is not None and not separate and seams.has_kv_connector():
                raise ConfigurationError(
                    "An engine of this process offloads its cache already, and vLLM can have one "
                    "such engine in a process: close it first, or start this one in "
                    'a process of its own (process="separate")'
                )
            try:
                with nullcontext() if separate else _inline_model:  # it runs the model once
                    llm = LLMEngine(
                        vllm_config=config,
                        executor_class=Executor.get_class(config),
                        log_stats=False,
                        multiprocess_mode=separate,
                    )
            except BaseException:
                seams.restore_block_hasher()
                raise
            if separate:
                seams.wake_on_engine_death(llm)
            else:
                _live_inline.add(id(self))
        return llm

    def _take_commands(self) -> bool:
        """Runs what callers asked for; waits for something to do. False once closed."""
        while True:
            try:
                command = self._commands.get(block=not self._handles)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _step(self) -> None:
        with nullcontext() if self._separate_process else _inline_model:
            outputs = self._llm.step()
        for output in outputs:
            handle = self._handles.get(output.request_id)
            if handle is None:
                continue
            if output.finished:
                self._handles.pop(output.request_id)
                self._engine_ids.pop(output.request_id, None)
            handle.put(
                Delta(
                    output.outputs,
                    output.finished,
                    output.num_cached_tokens,
                    getattr(output, "num_cache_creation_tokens", None),
                    time.perf_counter(),
                    _span_figures(output),
                )
            )

    def _fail(self, error: BaseException) -> None:
        while self._handles or not self._commands.empty():
            for request_id in list(self._handles):
                handle = self._handles.pop(request_id)
                engine_id = self._engine_ids.pop(request_id, None)
                handle.put(error)
                with suppress(Exception):  # the engine may be broken already
                    if engine_id is not None:
                        self._llm.abort_request([engine_id], internal=True)
            while not self._commands.empty():  # which may bring new handles
                command = self._commands.get()
                if command is not None:
                    with suppress(Exception):  # told to who asked
                        command()

    def _stop(self) -> None:
        llm, self._llm = self._llm, None
        client = llm.engine_core
        if self._separate_process:
            client.shutdown()
            return
        # As EngineCore.shutdown, but the process groups stay while another engine lives.
        client._finalizer.detach()
        core = client.engine_core
        core.structured_output_manager.clear_backend()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        gc.unfreeze()
        _live_inline.discard(id(self))
        _tear_down_groups()
        del llm, client, core
        gc.collect()
        if _live_inline:
            gc.freeze()  # as vLLM left the heap when it started the others


def _span_figures(output: Any) -> SpanFigures | None:
    """What our scheduler tells of a finished request, where it is ours."""
    values = (getattr(output, "kv_transfer_params", None) or {}).get(CONFIG_KEY)
    return SpanFigures.from_dict(values) if values else None


def _tear_down_groups() -> None:
    """Ends torch's process groups once no engine of this process needs them."""
    with _start_lock:
        if not _live_inline:
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()


class _environment:
    def __init__(self, name: str, value: str) -> None:
        self._name, self._value = name, value

    def __enter__(self) -> None:
        self._before = os.environ.get(self._name)
        os.environ[self._name] = self._value

    def __exit__(self, *exc: object) -> None:
        if self._before is None:
            del os.environ[self._name]
        else:
            os.environ[self._name] = self._before


def _stopped(error: BaseException) -> EngineError:
    ours = EngineError(f"The engine stopped: {error}")
    ours.__cause__ = error
    return ours


def _start_error(error: BaseException) -> BaseException:
    for cause in _chain(error):
        if isinstance(cause, MiniPICError):
            return cause
    if not isinstance(error, Exception):
        return error
    wrapped = EngineStartError(f"vLLM did not start: {error}")
    wrapped.__cause__ = error
    return wrapped


def _as_ours(error: Exception) -> Exception:
    """vLLM refuses a request with ValueError or TypeError; ours stay what they are, wrapped in one
    of vLLM's or not."""
    for cause in _chain(error):
        if isinstance(cause, MiniPICError):
            return cause
    ours: MiniPICError
    if isinstance(error, (ValueError, TypeError, *_vllm_refusals())):
        ours = PromptError(str(error))
    else:
        ours = EngineError(f"vLLM failed to take the request: {error}")
    ours.__cause__ = error
    return ours


def _vllm_refusals() -> tuple[type[Exception], ...]:
    from vllm.exceptions import VLLMValidationError

    return (VLLMValidationError,)


def _chain(error: BaseException | None) -> Any:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
