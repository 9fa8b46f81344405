"""Our own conformance suite, on ours over a fake engine."""

from __future__ import annotations

import time
from typing import Any

import pytest
from llama_index.core import Settings
from llama_index.core.llms import LLM, MockLLM
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


class TestTheSuiteCanFail:
    """On LlamaIndex's own mock model, which keeps LlamaIndex's own hazards."""

    def test_a_lists_repr(self) -> None:
        with pytest.raises(AssertionError):
            ResponseModeTests().test_no_list_is_printed_as_code(
                MockLLM(), "simple_summarize", "sync"
            )
        ResponseModeTests().test_no_list_is_printed_as_code(MockLLM(), "compact", "sync")

    def test_a_turn_that_is_a_template(self) -> None:
        llm = MockLLM(max_tokens=5)
        with pytest.raises(AssertionError):
            ChatEngineTests().test_what_users_say_is_not_a_template(llm, "context", "sync")
        ChatEngineTests().test_what_users_say_is_not_a_template(llm, "simple", "sync")

    def test_usage(self) -> None:
        with pytest.raises((AssertionError, TypeError)):
            LLMTests().test_usage(MockLLM())

    def test_a_blocked_event_loop(self) -> None:
        class Blocking(MiniPIC):
            async def achat(self, messages: Any, **kwargs: Any) -> Any:
                time.sleep(1.0)
                return self.chat(messages, **kwargs)

        with pytest.raises(AssertionError):
            LLMTests().test_async_leaves_the_event_loop_free(
                Blocking(engine=FakeEngine("Red, orange and yellow."))
            )

    def test_an_answer_in_one_piece(self) -> None:
        with pytest.raises(AssertionError, match="one piece"):
            LLMTests().test_streams_accumulate(MiniPIC(engine=FakeEngine("Red.")))
