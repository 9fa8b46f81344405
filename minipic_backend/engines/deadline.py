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
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        engine.abort(request_id)

    timer = threading.Timer(timeout_s, expire)
    timer.daemon = True
    timer.start()
    try:
        yield {**options, "request_id": request_id}
    except RequestAbortedError as error:
        if expired.is_set():
            raise TimeoutError(f"No answer within timeout={timeout_s} s") from error
        raise
    finally:
        timer.cancel()
