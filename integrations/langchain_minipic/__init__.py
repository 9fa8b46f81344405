"""LangChain on MiniPIC: retrieved documents become spans whose KV cache is reused anywhere.

from langchain_minipic import ChatMiniPIC, SpanPromptTemplate

`langchain_minipic.middleware` has a middleware for agents; it needs the package langchain.
"""

from __future__ import annotations

from langchain_minipic.chat_models import ChatMiniPIC
from langchain_minipic.document_prompts import SpanDocumentPrompt
from langchain_minipic.documents import Unranked, example_documents
from langchain_minipic.indexing import index_and_warm
from langchain_minipic.llms import MiniPIC
from langchain_minipic.messages import span_block, span_blocks
from langchain_minipic.prompts import SpanPromptTemplate
from langchain_minipic.provider import register_provider
from langchain_minipic.retrievers import WarmingRetriever

__all__ = [
    "ChatMiniPIC",
    "MiniPIC",
    "SpanDocumentPrompt",
    "SpanPromptTemplate",
    "Unranked",
    "WarmingRetriever",
    "example_documents",
    "index_and_warm",
    "register_provider",
    "span_block",
    "span_blocks",
]
