"""The prompts that a model was given, as instrumentation reports them."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

from llama_index.core.base.llms.types import TextBlock
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionStartEvent,
)
from llama_index_instrumentation import get_dispatcher
from pydantic import PrivateAttr

__all__ = ["PromptsSeen"]


class _Handler(BaseEventHandler):
    _prompts: list[str] = PrivateAttr(default_factory=list)
    _responses: list[Any] = PrivateAttr(default_factory=list)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    @classmethod
    def class_name(cls) -> str:
        return "PromptsSeen"

    def handle(self, event: Any, **kwargs: Any) -> None:
        with self._lock:
            if isinstance(event, LLMChatStartEvent):
                self._prompts.append("\n".join(_text(message) for message in event.messages))
            elif isinstance(event, LLMCompletionStartEvent):
                self._prompts.append(event.prompt)
            elif isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent):
                self._responses.append(event.response)


class PromptsSeen:
    """Collects within a `with` block, from any model and thread.

    Attributes:
        prompts: texts, one for each call; messages joined by line breaks.
        responses: what the calls gave back, in the end.
    """

    def __init__(self) -> None:
        self._handler = _Handler()

    @property
    def prompts(self) -> list[str]:
        return self._handler._prompts

    @property
    def responses(self) -> list[Any]:
        return self._handler._responses

    def __enter__(self) -> Self:
        get_dispatcher().add_event_handler(self._handler)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        get_dispatcher().event_handlers.remove(self._handler)


def _text(message: Any) -> str:
    return "".join(block.text for block in message.blocks if isinstance(block, TextBlock))
