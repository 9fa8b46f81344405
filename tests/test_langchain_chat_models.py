"""ChatMiniPIC on a fake engine: answers, usage, options, errors."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_minipic import ChatMiniPIC, MiniPIC, SpanPromptTemplate, span_block
from langchain_support import ANSWER, DOCUMENTS, collect, last_of
from llama_index.llms.minipic import MiniPIC as LlamaIndexMiniPIC

from minipic_backend import (
    ConfigurationError,
    PromptError,
)
from minipic_backend.sampling import LAYOUT_OPTIONS, SAMPLING_OPTIONS
from minipic_backend.testing import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(ANSWER)


@pytest.fixture
def llm(engine: FakeEngine) -> ChatMiniPIC:
    return ChatMiniPIC(model="m", engine=engine)


@pytest.fixture
def prompt() -> SpanPromptTemplate:
    return SpanPromptTemplate.from_messages(
        [("system", "Answer from the documents."), ("human", "{context}\n\nQuestion: {question}")]
    )


def test_usage_counts_cached_tokens_among_the_input(llm: ChatMiniPIC) -> None:
    messages = [HumanMessage([span_block("A document."), "And?"])]
    for _ in range(2):
        usage = llm.invoke(messages).usage_metadata
        details = usage["input_token_details"]
        assert usage["input_tokens"] >= details["cache_read"] + details["cache_creation"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert details["cache_read"] > 0


def test_response_metadata(llm: ChatMiniPIC) -> None:
    metadata = llm.invoke("x", max_tokens=2).response_metadata
    assert metadata["model_name"] == "m"
    assert metadata["finish_reason"] == "length"
    assert 0 <= metadata["ttft_s"] <= metadata["total_s"]


def test_options_reach_the_engine_those_of_a_call_first(engine: FakeEngine) -> None:
    llm = ChatMiniPIC(
        model="m",
        engine=engine,
        temperature=0,
        max_tokens=9,
        min_p=0.1,
        technique="primed",
        primer=False,
        model_kwargs={"top_k": 3},
    )
    llm.invoke("x")
    own = {"temperature": 0, "max_tokens": 9, "min_p": 0.1, "technique": "primed"}
    own |= {"primer": False, "top_k": 3}
    assert engine.calls[-1].options == own
    llm.bind(technique="full", max_tokens=2).invoke("x", temperature=1)
    called = {"technique": "full", "max_tokens": 2, "temperature": 1}
    assert engine.calls[-1].options == own | called


def test_technique_per_call(llm: ChatMiniPIC, prompt: SpanPromptTemplate) -> None:
    value = prompt.invoke({"context": DOCUMENTS, "question": "Who?"})
    assert "span" in {row.kind for row in llm.explain(value).rows}
    assert {row.kind for row in llm.explain(value, technique="full").rows} == {"prefix"}
    usage = llm.bind(technique="full").invoke(value).usage_metadata
    assert usage["input_token_details"] == {"cache_read": 0, "cache_creation": 0}


def test_techniques_of_chains_on_one_model(
    llm: ChatMiniPIC, engine: FakeEngine, prompt: SpanPromptTemplate
) -> None:
    asked = {"context": DOCUMENTS, "question": "Who?"}
    for chosen in (
        {"technique": "epic", "blocks": 2},
        {"technique": "epic_paper"},
        {"technique": "selective", "budget": 0.15},
    ):
        (prompt | llm.bind(**chosen)).invoke(asked)
        assert engine.calls[-1].options.items() >= chosen.items()
    with pytest.raises(ConfigurationError, match="budget and blocks"):
        (prompt | llm.bind(technique="selective", blocks=1)).invoke(asked)


def test_stop_of_constructor_and_call(engine: FakeEngine) -> None:
    llm = ChatMiniPIC(model="m", engine=engine, stop=[" was"])
    assert llm.invoke("x").content == "Her name"
    assert llm.invoke("x", stop=["me was"]).content == "Her na"
    assert llm.bind(stop=["name was"]).invoke("x").content == "Her "
    assert ChatMiniPIC(model="m", engine=engine, stop=" was").stop == [" was"]


@pytest.mark.parametrize("stop", [None, ["name was"], ["nothing like it"]])
def test_stop_is_the_same_in_streams(llm: ChatMiniPIC, stop: list[str] | None) -> None:
    whole = llm.invoke("x", stop=stop)
    for chunks in (list(llm.stream("x", stop=stop)), collect(llm.astream("x", stop=stop))):
        assert last_of(chunks).content == whole.content
        assert last_of(chunks).response_metadata["finish_reason"] == "stop"


def test_no_small_default_of_max_tokens(engine: FakeEngine) -> None:
    llm = ChatMiniPIC(model="m", engine=FakeEngine("word " * 300))
    assert llm.invoke("x").response_metadata["finish_reason"] == "stop"


def test_n_gives_n_generations() -> None:
    llm = ChatMiniPIC(model="m", engine=FakeEngine(["a", "b b", "c"]), n=3)
    result = llm.generate([[HumanMessage("x")]])
    assert [generation.text for generation in result.generations[0]] == ["a", "b b", "c"]
    usages = [generation.message.usage_metadata for generation in result.generations[0]]
    assert usages[0]["output_tokens"] == 4
    assert usages[1:] == [None, None]
    with pytest.raises(ConfigurationError, match="n=3"):
        list(llm.stream("x"))


def test_logprobs(llm: ChatMiniPIC) -> None:
    for message in (llm.invoke("x", logprobs=1), last_of(list(llm.stream("x", logprobs=1)))):
        entries = message.response_metadata["logprobs"]
        assert [entry["logprob"] for entry in entries] == [0.0] * 4


def test_unknown_options_are_refused(llm: ChatMiniPIC) -> None:
    with pytest.raises(ValueError, match="did you mean 'temperature'"):
        ChatMiniPIC(model="m", tempreature=0)
    with pytest.raises(ValueError, match="did you mean 'max_tokens'"):
        ChatMiniPIC(model="m", model_kwargs={"max_new_tokens": 3})
    with pytest.raises(ConfigurationError, match="did you mean 'max_tokens'"):
        llm.invoke("x", max_new_tokens=3)


@pytest.mark.parametrize("kind", [ChatMiniPIC, MiniPIC, LlamaIndexMiniPIC])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_name": "m"}, "did you mean 'model'"),
        ({"model": "m", "openai_api_base": "x"}, "did you mean 'base_url'"),
        ({"model": "m", "vllm_kwargs": {}}, "did you mean 'engine_options'"),
        ({"model": "m", "max_model_len": 2048}, "engine_options={'max_model_len'"),
        ({"model": "m", "gpu_memory_utilization": 0.5}, "engine_options="),
        ({"model": "m", "zzz": 1}, "goes into engine_options"),
        ({"model": "m", "technique": "prime"}, "'primed'"),
        ({"model": "m", "frame": "system"}, "'prefix'"),
        ({"model": "m", "offsets": "x"}, "'compact'"),
        ({"model": "m", "late": -1}, "late=-1: a whole number from 0"),
        ({"model": "m", "technique": "full", "late": -1}, "late=-1"),
        ({"model": "m", "blocks": -1}, "blocks=-1"),
        ({"model": "m", "budget": 1.5}, "budget=1.5"),
        ({"model": "m", "budget": float("nan")}, "budget=nan"),
        ({"model": "m", "see_markers": "no"}, "see_markers='no'"),
        ({"model": "m", "budget": 0.1, "blocks": 1}, "exclude each other"),
        ({"model": "m", "technique": "epic", "budget": 0.1}, "blocks=0 turns it off"),
        ({"model": "m", "technique": "selective", "blocks": 1}, "budget=0 turns it off"),
    ],
)
def test_wrong_arguments_are_told_where_the_model_is_made(
    kind: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**given)


@pytest.mark.parametrize("kind", [ChatMiniPIC, MiniPIC, LlamaIndexMiniPIC])
def test_layout_options_that_some_engine_takes_are_taken(kind: Any) -> None:
    for given in (
        {"late": 0, "blocks": 1, "offsets": "padded"},
        {"technique": "selective", "budget": 0.5, "blocks": 0},
        {"frame": "universal", "primer": ["a", "b"], "see_markers": False},
        {"primer": False, "late": 3},
        {"technique": "prompt_cache"},
    ):
        kind(model="m", **given)


def test_options_of_the_engine_are_none_of_a_call(llm: ChatMiniPIC) -> None:
    with pytest.raises(ConfigurationError, match="'max_model_len': it is the engine's, not a call"):
        llm.invoke("x", max_model_len=3)


@pytest.mark.parametrize("kind", [ChatMiniPIC, MiniPIC, LlamaIndexMiniPIC])
def test_what_a_model_is_made_with_is_no_option_of_a_call(kind: Any, engine: FakeEngine) -> None:
    """Whatever MiniPIC's own fields are: the error says where they go."""
    ours = {name for base in kind.__mro__ if base.__name__ == "ModelOptions"
            for name in base.model_fields}  # fmt: skip
    options = SAMPLING_OPTIONS | LAYOUT_OPTIONS | {"model_kwargs", "additional_kwargs"}
    model = kind(model="m", engine=engine)
    ask = model.complete if kind is LlamaIndexMiniPIC else model.invoke
    assert {"model", "base_url", "timeout"} <= ours - options
    for name in ours - options:
        with pytest.raises(ConfigurationError, match=f"'{name}': it is given where the model"):
            ask("x", **{name: "x"})


def test_chat_template_kwargs(engine: FakeEngine) -> None:
    llm = ChatMiniPIC(
        model="m", engine=engine, chat_template_kwargs={"a": 1, "enable_thinking": True}
    )
    llm.invoke("x", chat_template_kwargs={"enable_thinking": False})
    assert engine.prompts[-1].template_kwargs == {"a": 1, "enable_thinking": False}


def test_bad_prompts_are_refused_and_the_model_goes_on(
    llm: ChatMiniPIC, prompt: SpanPromptTemplate
) -> None:
    with pytest.raises(PromptError):
        llm.invoke([])
    with pytest.raises(PromptError):
        (prompt | llm).invoke({"context": [], "question": "x"})
    with pytest.raises(PromptError, match="context"):
        llm.invoke("word " * 5000)
    assert llm.invoke("x").content == ANSWER
