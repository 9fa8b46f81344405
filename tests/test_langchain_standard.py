"""LangChain's own unit suite; the integration suite runs in tests/engine."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_minipic import ChatMiniPIC
from langchain_tests.unit_tests import ChatModelUnitTests

from minipic_backend.testing import FakeEngine


class TestEmbedded(ChatModelUnitTests):
    """As a user makes it: nothing starts before the first prompt."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatMiniPIC

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {"model": "HuggingFaceTB/SmolLM2-135M-Instruct"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"MINIPIC_API_KEY": "a key"}, self.chat_model_params, {"api_key": "a key"}


class TestInjected(TestEmbedded):
    """With an engine handed over."""

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {"model": "m", "engine": FakeEngine()}
