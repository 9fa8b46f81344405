"""Chat engines that pack nodes whole without a global setting.

LlamaIndex gives its own chat engines no argument for a prompt helper: they take
`Settings.prompt_helper`, which `install` sets. Where nothing global is wanted, use these.
"""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.response_synthesizers import CompactAndRefine
from llama_index.llms.minipic._spans import SpanMethods
from llama_index.llms.minipic.prompt_helper import SpanPromptHelper

__all__ = ["SpanCondensePlusContextChatEngine", "SpanContextChatEngine"]


class SpanContextChatEngine(ContextChatEngine):
    """LlamaIndex's `ContextChatEngine`, for a `MiniPIC`."""

    def _get_response_synthesizer(
        self, chat_history: list[ChatMessage], streaming: bool = False
    ) -> CompactAndRefine:
        synthesizer = super()._get_response_synthesizer(chat_history, streaming)
        return _packing(synthesizer, self._llm)


class SpanCondensePlusContextChatEngine(CondensePlusContextChatEngine):
    """LlamaIndex's `CondensePlusContextChatEngine`, for a `MiniPIC`."""

    def _get_response_synthesizer(
        self, chat_history: list[ChatMessage], streaming: bool = False
    ) -> CompactAndRefine:
        synthesizer = super()._get_response_synthesizer(chat_history, streaming)
        return _packing(synthesizer, self._llm)


def _packing(synthesizer: CompactAndRefine, llm: Any) -> CompactAndRefine:
    if isinstance(llm, SpanMethods):
        synthesizer._prompt_helper = SpanPromptHelper(llm)
    return synthesizer
