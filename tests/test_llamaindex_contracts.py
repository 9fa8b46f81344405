"""What we rely on in LlamaIndex beyond its public interface (docs/llamaindex.md has the list)."""

from __future__ import annotations

import inspect
from typing import Any

import llama_index.core
import pytest
from llama_index.core import Settings
from llama_index.core.base.llms.generic_utils import messages_to_history_str
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
)
from llama_index.core.chat_engine.condense_plus_context import DEFAULT_CONDENSE_PROMPT_TEMPLATE
from llama_index.core.chat_engine.condense_question import DEFAULT_TEMPLATE
from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
from llama_index.core.instrumentation import DispatcherSpanMixin
from llama_index.core.llms import LLM
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.llms.minipic import MiniPIC
from llama_index.llms.minipic.testing.chat_engines import chat_engine

from minipic_backend.testing import FakeEngine


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_version() -> None:
    assert llama_index.core.__version__.startswith("0.14.")


def test_templates_become_prompts_in_two_places() -> None:
    assert parameters(LLM._get_messages) == ["self", "prompt", "prompt_args"]
    assert parameters(LLM._get_prompt) == ["self", "prompt", "prompt_args"]
    for name in ("predict", "apredict", "stream", "astream"):
        source = inspect.getsource(inspect.unwrap(getattr(LLM, name)))
        assert "self._get_messages(prompt" in source
        assert "self._get_prompt(prompt" in source


def test_structured_streams() -> None:
    expected = ["self", "output_cls", "prompt", "llm_kwargs", "prompt_args"]
    assert parameters(LLM._structured_stream_call) == expected
    assert parameters(LLM._structured_astream_call) == expected


@pytest.mark.parametrize("name", ["repack", "truncate"])
def test_prompt_helpers(name: str) -> None:
    expected = ["self", "prompt", "text_chunks", "padding", "llm", "tools"]
    assert parameters(getattr(PromptHelper, name)) == expected
    expected[2] = "messages"
    assert parameters(getattr(ChatPromptHelper, f"a{name}")) == expected


def test_syntheses_are_reported_with_their_nodes() -> None:
    assert issubclass(BaseSynthesizer, DispatcherSpanMixin)
    for name in ("synthesize", "asynthesize"):
        method = getattr(BaseSynthesizer, name)
        assert "nodes" in parameters(method)
        assert hasattr(method, "__wrapped__")  # `@dispatcher.span`


def test_chat_engines() -> None:
    for kind in (ContextChatEngine, CondensePlusContextChatEngine):
        expected = ["self", "chat_history", "streaming"]
        assert parameters(kind._get_response_synthesizer) == expected
    llm = MiniPIC(engine=FakeEngine())
    assert "{context_str}" in chat_engine("context", llm)._context_template.template  # type: ignore[attr-defined]
    engine: Any = chat_engine("condense_plus_context", llm)
    assert "{context_str}" in engine._context_prompt_template.template
    question: Any = chat_engine("condense_question", llm)
    assert isinstance(question, CondenseQuestionChatEngine)
    assert question._query_engine is not None


def test_a_chat_engines_template_has_the_shape_that_is_guarded() -> None:
    """Documents in the first message, earlier turns, the question alone in the last."""
    engine: Any = chat_engine("context", MiniPIC(engine=FakeEngine()))
    from llama_index.core.base.llms.types import ChatMessage

    synthesizer = engine._get_response_synthesizer([ChatMessage("Earlier."), ChatMessage("Turn.")])
    for template in (synthesizer._text_qa_template, synthesizer._refine_template):
        assert type(template) is ChatPromptTemplate
        first, *_, last = template.message_templates
        assert "{context_str}" in first.content or "{context_msg}" in first.content
        assert last.content == "{query_str}"


def test_settings() -> None:
    names = {"_llm", "_prompt_helper", "_chat_prompt_helper", "_tokenizer"}
    assert names <= set(vars(Settings))
    assert hasattr(llama_index.core, "global_tokenizer")


def test_condensing_templates() -> None:
    """The chat stands in one place, the question behind it."""
    for template in (DEFAULT_TEMPLATE, DEFAULT_CONDENSE_PROMPT_TEMPLATE):
        assert template.count("{chat_history}") == template.count("{question}") == 1
        assert template.index("{chat_history}") < template.index("{question}")
    transcript = messages_to_history_str([ChatMessage(content="a"), ChatMessage(content="b")])
    assert transcript == "user: a\nuser: b"
