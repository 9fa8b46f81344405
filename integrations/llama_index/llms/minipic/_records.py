"""What each call cost, for those who never see its response."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llama_index.core.instrumentation.events import BaseEvent
from llama_index_instrumentation import get_dispatcher

from minipic_backend import Timing, Usage

__all__ = ["CallEvent", "CallLog", "CallRecord"]

_KEPT = 1000

dispatcher = get_dispatcher(__name__)


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One request to the engine.

    Args:
        kind: "chat" or "complete".
        request_id: the engine's id of it.
        usage: its tokens; `usage.cached_tokens` were read from the cache.
        timing: seconds to the first and to the last token.
        finish_reason: "stop", "length", …
        dropped_messages: messages of the chat that were left out to fit into the context.
    """

    kind: str
    request_id: str
    usage: Usage
    timing: Timing | None
    finish_reason: str | None
    dropped_messages: int = 0


class CallEvent(BaseEvent):
    """Instrumentation: a request to the engine has finished."""

    record: CallRecord

    @classmethod
    def class_name(cls) -> str:
        return "MiniPICCallEvent"


class CallLog:
    """The last calls, from all threads."""

    def __init__(self) -> None:
        self.recent: deque[CallRecord] = deque(maxlen=_KEPT)
        self._open: list[list[CallRecord]] = []
        self._lock = threading.Lock()

    def add(self, record: CallRecord) -> None:
        with self._lock:
            self.recent.append(record)
            for records in self._open:
                records.append(record)
        dispatcher.event(CallEvent(record=record))

    @contextmanager
    def recording(self) -> Iterator[list[CallRecord]]:
        """The list that records go to until the block ends."""
        records: list[CallRecord] = []
        with self._lock:
            self._open.append(records)
        try:
            yield records
        finally:
            with self._lock:
                self._open = [one for one in self._open if one is not records]

    def __deepcopy__(self, memo: Any) -> CallLog:
        return CallLog()

    def __reduce__(self) -> Any:  # a lock cannot be pickled
        return (CallLog, ())
