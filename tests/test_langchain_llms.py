"""MiniPIC, the text model, on a fake engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.outputs import LLMResult
from langchain_minipic import MiniPIC, SpanPromptTemplate

from minipic_backend import ConfigurationError, EngineClosedError, Prompt, Span, Text
from minipic_backend.testing import FakeEngine

ANSWER = "Her name was Teutberga."


def echo(prompt: Prompt) -> str:
    return "".join(part.text for part in prompt.parts).upper()


def collect(stream: AsyncIterator[str]) -> list[str]:
    async def main() -> list[str]:
        return [piece async for piece in stream]

    return asyncio.run(main())


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(ANSWER)


@pytest.fixture
def llm(engine: FakeEngine) -> MiniPIC:
    return MiniPIC(model="m", engine=engine)


def test_text_in_text_out(llm: MiniPIC, engine: FakeEngine) -> None:
    assert llm.invoke("x") == ANSWER
    assert asyncio.run(llm.ainvoke("x")) == ANSWER
    assert engine.prompts == [Prompt("x"), Prompt("x")]


def test_streams(llm: MiniPIC) -> None:
    pieces = ["Her", " name", " was", " Teutberga."]
    assert list(llm.stream("x")) == collect(llm.astream("x")) == pieces
    assert "".join(llm.stream("x", stop=["was T"])) == llm.invoke("x", stop=["was T"])


def test_streams_tell_usage_once() -> None:
    class Ends(BaseCallbackHandler):
        results: list[LLMResult]
        tokens: list[str]

        def on_llm_new_token(self, token: str, **_: Any) -> None:
            self.tokens.append(token)

        def on_llm_end(self, response: LLMResult, **_: Any) -> None:
            self.results.append(response)

    handler = Ends()
    handler.results, handler.tokens = [], []
    llm = MiniPIC(model="m", engine=FakeEngine(ANSWER), callbacks=[handler])
    list(llm.stream("x"))
    collect(llm.astream("x"))
    assert "".join(handler.tokens) == ANSWER * 2
    for result in handler.results:
        info = result.generations[0][0].generation_info
        assert info["usage_metadata"]["output_tokens"] == 4
        assert info["model_name"] == "m"
        assert info["finish_reason"] == "stop"


def test_batch_runs_in_the_engine_at_once() -> None:
    engine = FakeEngine(echo, gather=20)
    llm = MiniPIC(model="m", engine=engine)
    texts = [f"q{index}" for index in range(20)]
    assert llm.batch(texts) == [text.upper() for text in texts]
    assert engine.max_concurrency == 20
    asyncio.run(llm.abatch(texts))
    assert [row[0].text for row in llm.generate(texts).generations] == llm.batch(texts)


def test_usage_of_all_prompts(llm: MiniPIC) -> None:
    result = llm.generate(["a b", "c"])
    assert result.llm_output["token_usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 8,
        "total_tokens": 11,
    }
    details = result.generations[0][0].generation_info["usage_metadata"]["input_token_details"]
    assert details == {"cache_read": 0, "cache_creation": 0}


def test_n(llm: MiniPIC) -> None:
    result = MiniPIC(model="m", engine=FakeEngine(["a", "b"]), n=2).generate(["x"])
    assert [generation.text for generation in result.generations[0]] == ["a", "b"]
    with pytest.raises(ConfigurationError, match="n=2"):
        list(llm.stream("x", n=2))


def test_spans_of_a_chat_prompt_survive(llm: MiniPIC, engine: FakeEngine) -> None:
    prompt = SpanPromptTemplate([("system", "Answer."), ("human", "{context}\n\n{question}")])
    values = {
        "context": [Document("First {x}."), Document("Second.")],
        "question": "Which {context}?",
    }
    value = prompt.invoke(values)
    chain = prompt | llm
    for ask in (chain.invoke, lambda v: list(chain.stream(v)), lambda v: chain.batch([v])):
        ask(values)
        assert engine.prompts[-1] == Prompt(
            [
                Text("System: Answer.\nHuman: "),
                Span("First {x}.", rank=0),
                Text("\n\n"),
                Span("Second.", rank=1),
                Text("\n\nWhich {context}?"),
            ]
        )
    llm.generate_prompt([value])
    asyncio.run(llm.agenerate_prompt([value]))
    assert engine.prompts[-1] == engine.prompts[-2] == engine.prompts[0]
    assert echo(engine.prompts[-1]) == value.to_string().upper()
    assert llm.explain(value).rows[1].kind == "span"
    assert llm.warm(["Third."], prompt).num_spans == 1


def test_cache_knows_the_options_of_a_call() -> None:
    """LangChain's own key for text models leaves them out."""
    engine = FakeEngine(["a", "b", "c", "d"])
    llm = MiniPIC(model="m", engine=engine, cache=InMemoryCache())
    assert [llm.invoke("x"), llm.invoke("x")] == ["a", "a"]
    hot = llm.bind(temperature=1.0)
    assert [hot.invoke("x"), hot.invoke("x"), llm.invoke("x")] == ["b", "b", "a"]
    assert llm.invoke("x", technique="full") == "c"
    assert asyncio.run(llm.ainvoke("x", min_p=0.5)) == "d"
    assert engine.calls[-1].options == {"min_p": 0.5}
    assert len(engine.calls) == 4


def test_unknown_options_are_refused(llm: MiniPIC) -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'max_tokens'"):
        llm.invoke("x", max_new_tokens=3)
    with pytest.raises(ValueError, match="did you mean 'top_p'"):
        MiniPIC(model="m", topp=1)


@pytest.mark.parametrize("texts", [["x"], ["x", "y", "z"]])
def test_timeout_aborts(texts: list[str]) -> None:
    engine = FakeEngine(ttft_s=30)
    llm = MiniPIC(model="m", engine=engine, timeout=0.05)
    started = time.perf_counter()
    for call in (lambda: llm.batch(texts), lambda: asyncio.run(llm.abatch(texts))):
        with pytest.raises(TimeoutError):
            call()
    assert time.perf_counter() - started < 2
    assert len(engine.aborted) == 2 * len(texts)


def test_close(llm: MiniPIC, engine: FakeEngine) -> None:
    with llm:
        assert llm.get_num_tokens("one two") == 2
    with pytest.raises(EngineClosedError):
        llm.invoke("x")
    assert not engine.closed
    assert llm._llm_type == "minipic"
    assert llm._get_ls_params()["ls_model_type"] == "llm"
