"""An event loop on a thread of its own.

All connections belong to it, so that callers on any thread or event loop, one after the other or
at once, share them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["LoopThread"]

_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines for other threads until it is stopped.

    Args:
        name: of the thread.
        clean_up: runs on the loop at the end, after everything else was cancelled.
    """

    def __init__(self, name: str, clean_up: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._clean_up = clean_up
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], object]) -> None:
        """Calls `function()` on the loop, soon; in the order of the calls of one thread.

        Raises:
            RuntimeError: stopped.
        """
        self._loop.call_soon_threadsafe(function)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Starts a coroutine; its result from any thread."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise

    def stop(self) -> None:
        """Ends the loop and its thread; whatever still runs there is cancelled first."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._finish())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    async def _finish(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._clean_up()
