"""LangChain's own integration suite on the real model."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_minipic import ChatMiniPIC, span_block
from langchain_model import model_params
from langchain_tests.integration_tests import ChatModelIntegrationTests


class ChatSuite(ChatModelIntegrationTests):
    """What we claim, for every engine."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatMiniPIC

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return model_params(max_tokens=48)

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> dict[Any, Any]:
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        return self._invoke("A document about cats. " * 20, stream=stream)

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        return self._invoke("A document about dogs. " * 20, stream=stream)

    def _invoke(self, document: str, *, stream: bool) -> AIMessage:
        model = self.chat_model_class(**{**self.chat_model_params, "max_tokens": 4})
        messages = [SystemMessage("Be brief."), HumanMessage([span_block(document), "What is it?"])]
        model.invoke(messages)
        if not stream:
            return model.invoke(messages)
        chunks = list(model.stream(messages))
        return sum(chunks[1:], chunks[0])


class TestEmbedded(ChatSuite):
    """The engine in this process."""
