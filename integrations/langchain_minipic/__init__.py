"""LangChain on MiniPIC: retrieved documents become spans whose KV cache is reused anywhere.

from langchain_minipic import ChatMiniPIC, SpanPromptTemplate
"""

from __future__ import annotations

from langchain_minipic.chat_models import ChatMiniPIC
from langchain_minipic.llms import MiniPIC
from langchain_minipic.messages import span_block
from langchain_minipic.prompts import SpanPromptTemplate

__all__ = ["ChatMiniPIC", "MiniPIC", "SpanPromptTemplate", "span_block"]
