"""LangChain's own integration suites, and ours for text models, on the embedded engine."""

from __future__ import annotations

from typing import Any

from langchain_model import model_params
from langchain_suites import ChatSuite, RetrieverSuite, TextSuite


class TestChat(ChatSuite):
    @property
    def params(self) -> dict[str, Any]:
        return model_params()


class TestText(TextSuite):
    @property
    def params(self) -> dict[str, Any]:
        return model_params()


class TestRetriever(RetrieverSuite):
    @property
    def params(self) -> dict[str, Any]:
        return model_params()
