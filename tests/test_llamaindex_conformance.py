"""Our own conformance suite, on ours over a fake engine."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import Settings
from llama_index.core.llms import LLM
from llama_index.llms.minipic import MiniPIC
from llama_index.llms.minipic.testing import ChatEngineTests, LLMTests, ResponseModeTests

from minipic_backend.testing import FakeEngine


class TestMiniPIC(LLMTests, ResponseModeTests, ChatEngineTests):
    """Every model asks the global one for `no_text` alone: nothing else is global here."""

    @pytest.fixture
    def llm(self) -> LLM:
        return MiniPIC(engine=FakeEngine("Red, orange and yellow."))


class TestOurPromptHelper(ResponseModeTests):
    @pytest.fixture
    def llm(self) -> LLM:
        return MiniPIC(engine=FakeEngine("Red, orange and yellow."))

    def query_engine(self, llm: Any, *args: Any) -> Any:
        self.prompt_helper = llm.prompt_helper  # type: ignore[misc]
        return super().query_engine(llm, *args)


class TestInstalled(ChatEngineTests):
    """With our prompt helper as the global one."""

    @pytest.fixture
    def llm(self, monkeypatch: pytest.MonkeyPatch) -> LLM:
        llm = MiniPIC(engine=FakeEngine("Red, orange and yellow."))
        monkeypatch.setattr(Settings, "_prompt_helper", llm.prompt_helper)
        return llm


class TestTextModel(ResponseModeTests):
    """A model without chat template."""

    @pytest.fixture
    def llm(self) -> LLM:
        return MiniPIC(engine=FakeEngine("Red, orange and yellow."), is_chat_model=False)
