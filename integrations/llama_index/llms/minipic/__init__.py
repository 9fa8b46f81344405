"""LlamaIndex on vLLM with MiniPIC: nodes become spans whose KV cache is reused anywhere."""

from __future__ import annotations

from llama_index.llms.minipic._install import install
from llama_index.llms.minipic._messages import SpanPoint, span_blocks
from llama_index.llms.minipic._nodes import node_text
from llama_index.llms.minipic._records import CallEvent, CallRecord
from llama_index.llms.minipic.base import MiniPIC
from llama_index.llms.minipic.prompt_helper import SpanChatPromptHelper, SpanPromptHelper

__all__ = [
    "CallEvent",
    "CallRecord",
    "MiniPIC",
    "SpanChatPromptHelper",
    "SpanPoint",
    "SpanPromptHelper",
    "install",
    "node_text",
    "span_blocks",
]
