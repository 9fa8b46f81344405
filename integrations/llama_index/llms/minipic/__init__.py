"""LlamaIndex on vLLM with MiniPIC: nodes become spans whose KV cache is reused anywhere."""

from __future__ import annotations

from llama_index.llms.minipic._install import install
from llama_index.llms.minipic._messages import SpanPoint, span_blocks
from llama_index.llms.minipic._nodes import node_text
from llama_index.llms.minipic._records import CallEvent, CallRecord
from llama_index.llms.minipic.base import MiniPIC
from llama_index.llms.minipic.chat_engines import (
    SpanCondensePlusContextChatEngine,
    SpanContextChatEngine,
)
from llama_index.llms.minipic.prompt_helper import SpanChatPromptHelper, SpanPromptHelper
from llama_index.llms.minipic.tools import SpanRetrieverTool
from llama_index.llms.minipic.warming import SpanWarmer

__all__ = [
    "CallEvent",
    "CallRecord",
    "MiniPIC",
    "SpanChatPromptHelper",
    "SpanCondensePlusContextChatEngine",
    "SpanContextChatEngine",
    "SpanPoint",
    "SpanPromptHelper",
    "SpanRetrieverTool",
    "SpanWarmer",
    "install",
    "node_text",
    "span_blocks",
]
