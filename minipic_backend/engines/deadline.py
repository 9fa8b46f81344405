"""Requests that may take so long and no longer."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from minipic_backend.errors import RequestAbortedError
from minipic_backend.protocol import EngineProtocol

__all__ = ["deadline"]

_AGAIN_S = 0.05
"""Between aborts: of a request that is still being laid out when its time is over, an engine knows
nothing yet."""


@contextmanager
def deadline(
    engine: EngineProtocol, options: Mapping[str, Any], timeout_s: float | None
) -> Iterator[dict[str, Any]]:
    """Options under which a request is aborted `timeout_s` seconds from now; None: never.

    Raises:
        TimeoutError: it was.
    """
    if timeout_s is None:
        yield dict(options)
        return
    request_id = options.get("request_id") or uuid.uuid4().hex
    expired, over = threading.Event(), threading.Event()

    def watch() -> None:
        wait_s = timeout_s
        while not over.wait(wait_s):
            expired.set()
            engine.abort(request_id)
            wait_s = _AGAIN_S

    threading.Thread(target=watch, name="minipic-deadline", daemon=True).start()
    try:
        yield {**options, "request_id": request_id}
    except RequestAbortedError as error:
        if expired.is_set():
            raise TimeoutError(f"No answer within timeout={timeout_s} s") from error
        raise
    finally:
        over.set()
