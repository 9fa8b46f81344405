"""ChatMiniPIC on a fake engine: what users ran into with other classes, by name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_minipic import ChatMiniPIC, SpanPromptTemplate, span_block

from minipic_backend import (
    ConfigurationError,
    EngineClosedError,
    Message,
    Prompt,
    PromptError,
    Span,
    Text,
)
from minipic_backend.testing import FakeEngine

DOCUMENTS = [
    Document("Lothair II was a king.", id="lothair"),
    Document("Teutberga was his queen."),
    Document("Waldrada came after her."),
]
ANSWER = "Her name was Teutberga."


class Retriever(BaseRetriever):
    """Gives the documents in an order that depends on the question."""

    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        return DOCUMENTS[len(query) % 3 :] + DOCUMENTS[: len(query) % 3]


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


def last_of(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    return whole


def collect(stream: AsyncIterator[AIMessageChunk]) -> list[AIMessageChunk]:
    async def main() -> list[AIMessageChunk]:
        return [chunk async for chunk in stream]

    return asyncio.run(main())


def test_the_snippet_of_the_documentation(
    llm: ChatMiniPIC, engine: FakeEngine, prompt: SpanPromptTemplate
) -> None:
    retriever = Retriever()
    chain = {"context": retriever, "question": RunnablePassthrough()} | prompt | llm
    message = chain.invoke("Who was the wife of Lothair II?")
    assert message.content == ANSWER
    assert message.usage_metadata["input_token_details"] == {
        "cache_read": 0,
        "cache_creation": 16 * 2 + 32,
    }
    report = llm.warm(DOCUMENTS)
    assert (report.num_spans, report.num_computed_tokens) == (3, 16)
    again = chain.invoke("Who was it then?")
    assert again.usage_metadata["input_token_details"]["cache_creation"] == 0
    table = str(llm.explain(prompt.invoke({"context": DOCUMENTS, "question": "Who?"})))
    assert "span" in table
    assert "warm" in table
    assert [span.id for span in engine.prompts[0].spans] == [None, None, "lothair"]


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


# Options


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


def test_tools_are_not_silently_ignored(llm: ChatMiniPIC) -> None:
    with pytest.raises(NotImplementedError):
        llm.bind_tools([])
    with pytest.raises(ConfigurationError, match="tools"):
        llm.bind(tools=[]).invoke("x")


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


# Streams


def test_streams_come_in_pieces_with_one_id(llm: ChatMiniPIC) -> None:
    for chunks in (list(llm.stream("x")), collect(llm.astream("x"))):
        assert [chunk.content for chunk in chunks] == ["Her", " name", " was", " Teutberga."]
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[0].id


def test_usage_and_name_once_on_the_last_chunk(llm: ChatMiniPIC) -> None:
    whole = llm.invoke("x")
    for chunks in (list(llm.stream("x")), collect(llm.astream("x"))):
        assert all(chunk.usage_metadata is None for chunk in chunks[:-1])
        assert all(not chunk.response_metadata for chunk in chunks[:-1])
        assert [chunk.chunk_position for chunk in chunks] == [None, None, None, "last"]
        merged = last_of(chunks)
        assert merged.usage_metadata == whole.usage_metadata
        assert merged.response_metadata["model_name"] == "m"
        assert merged.response_metadata["finish_reason"] == "stop"


def test_callbacks_see_tokens_and_usage(llm: ChatMiniPIC) -> None:
    class Tokens(BaseCallbackHandler):
        seen: list[str]

        def on_llm_new_token(self, token: Any, **_: Any) -> None:
            self.seen.append(token)

    handler, usage = Tokens(), UsageMetadataCallbackHandler()
    handler.seen = []
    list(llm.stream("x", config={"callbacks": [handler, usage]}))
    assert "".join(handler.seen) == ANSWER
    assert usage.usage_metadata["m"]["output_tokens"] == 4
    streaming = ChatMiniPIC(model="m", engine=FakeEngine(ANSWER), streaming=True)
    handler.seen = []
    assert streaming.invoke("x", config={"callbacks": [handler]}).content == ANSWER
    assert "".join(handler.seen) == ANSWER


def test_stream_events(llm: ChatMiniPIC) -> None:
    async def main() -> list[dict[str, Any]]:
        return [event async for event in llm.astream_events("x", version="v2")]

    events = asyncio.run(main())
    tokens = [e["data"]["chunk"].content for e in events if e["event"] == "on_chat_model_stream"]
    assert "".join(tokens) == ANSWER
    assert events[-1]["data"]["output"].usage_metadata["output_tokens"] == 4


def test_leaving_a_stream_aborts_the_request() -> None:
    engine = FakeEngine("word " * 1000, token_s=0.001)
    llm = ChatMiniPIC(model="m", engine=engine)
    stream = llm.stream("x")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert len(engine.aborted) == 1

    async def main() -> None:
        async for _ in llm.astream("x"):
            break
        await asyncio.sleep(0.05)
        assert len(engine.aborted) == 2

    asyncio.run(main())


# At once


def test_batch_runs_in_the_engine_at_once() -> None:
    engine = FakeEngine(lambda p: p.messages[-1].parts[0].text.upper(), ttft_s=1)
    llm = ChatMiniPIC(model="m", engine=engine)
    texts = [f"q{index}" for index in range(64)]
    started = time.perf_counter()
    answers = llm.batch(texts)
    assert [answer.content for answer in answers] == [text.upper() for text in texts]
    assert engine.max_concurrency == 64
    assert time.perf_counter() - started < 10

    bounded = FakeEngine(ttft_s=0.02)
    ChatMiniPIC(model="m", engine=bounded).batch(texts[:8], {"max_concurrency": 2})
    assert bounded.max_concurrency == 2


def test_every_way_to_ask_at_once_is_concurrent() -> None:
    texts = [f"q{index}" for index in range(20)]
    lists: list[list[BaseMessage]] = [[HumanMessage(text)] for text in texts]

    def engine() -> tuple[FakeEngine, ChatMiniPIC]:
        fake = FakeEngine(lambda p: p.messages[-1].parts[0].text.upper(), ttft_s=0.5)
        return fake, ChatMiniPIC(model="m", engine=fake)

    expected = [text.upper() for text in texts]
    fake, llm = engine()
    assert [m.content for m in asyncio.run(llm.abatch(texts))] == expected
    assert fake.max_concurrency == 20
    fake, llm = engine()
    result = llm.generate(lists)
    assert [row[0].text for row in result.generations] == expected
    assert len(result.run or []) == 20
    assert fake.max_concurrency == 20
    fake, llm = engine()
    completed = dict(llm.batch_as_completed(texts))
    assert [completed[index].content for index in range(20)] == expected
    assert fake.max_concurrency == 20


def test_batch_returns_exceptions_in_place() -> None:
    def answer(prompt: Prompt) -> str:
        if prompt.messages[-1].parts[0].text == "bad":
            raise ValueError("bad one")
        return "ok"

    llm = ChatMiniPIC(model="m", engine=FakeEngine(answer))
    good, bad, last = llm.batch(["a", "bad", "b"], return_exceptions=True)
    assert (good.content, last.content) == ("ok", "ok")
    assert isinstance(bad, ValueError)


def test_the_event_loop_is_not_blocked(prompt: SpanPromptTemplate) -> None:
    engine = FakeEngine(ANSWER, ttft_s=0.3, token_s=0.02)
    llm = ChatMiniPIC(model="m", engine=engine)
    chain = prompt | llm
    values = {"context": DOCUMENTS * 10, "question": "Who?"}

    async def main() -> float:
        worst, done = 0.0, False

        async def tick() -> None:
            nonlocal worst
            while not done:
                before = time.perf_counter()
                await asyncio.sleep(0.005)
                worst = max(worst, time.perf_counter() - before - 0.005)

        async def stream() -> str:
            return "".join([str(chunk.content) async for chunk in chain.astream(values)])

        ticker = asyncio.create_task(tick())
        await asyncio.sleep(0)
        answers = await asyncio.gather(
            stream(), llm.awarm(DOCUMENTS, prompt), *(chain.ainvoke(values) for _ in range(8))
        )
        done = True
        await ticker
        assert answers[0] == answers[-1].content == ANSWER
        return worst

    assert asyncio.run(main()) < 0.05


def test_asyncio_run_twice(llm: ChatMiniPIC) -> None:
    for _ in range(2):
        assert asyncio.run(llm.ainvoke("x")).content == ANSWER


@pytest.mark.parametrize("asynchronous", [False, True])
def test_timeout_aborts(asynchronous: bool) -> None:
    engine = FakeEngine(ttft_s=30)
    llm = ChatMiniPIC(model="m", engine=engine, timeout=0.05)
    started = time.perf_counter()
    calls = [
        lambda: asyncio.run(llm.ainvoke("x")) if asynchronous else llm.invoke("x"),
        lambda: collect(llm.astream("x")) if asynchronous else list(llm.stream("x")),
    ]
    for call in calls:
        with pytest.raises(TimeoutError, match=r"timeout=0\.05"):
            call()
    assert time.perf_counter() - started < 2
    assert len(engine.aborted) == 2
    patient = ChatMiniPIC(model="m", engine=FakeEngine(ANSWER), timeout=30)
    assert patient.invoke("x").content == ANSWER


# The same prompt elsewhere


class Recorder(GenericFakeChatModel):
    """Any other chat model, as the same chain sees it."""

    seen: list[list[BaseMessage]] = []  # noqa: RUF012  # a pydantic field, copied per instance

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> Any:
        self.seen.append(messages)
        return super()._generate(messages, *args, **kwargs)


def answers() -> Iterator[AIMessage]:
    while True:
        yield AIMessage("ok")


def test_another_chat_model_gets_the_plain_text(
    engine: FakeEngine, llm: ChatMiniPIC, prompt: SpanPromptTemplate
) -> None:
    other = Recorder(messages=answers())
    for model in (llm, other):
        chain = {"context": Retriever(), "question": RunnablePassthrough()} | prompt | model
        chain.invoke("Who was {it}?")
    ours = ["".join(part.text for part in m.parts) for m in engine.prompts[-1].messages]
    theirs = [message.text for message in other.seen[-1]]
    plain = ChatPromptTemplate.from_messages(
        [("system", "Answer from the documents."), ("human", "{context}\n\nQuestion: {question}")]
    ).invoke(
        {
            "context": "\n\n".join(
                document.page_content for document in Retriever().invoke("Who was {it}?")
            ),
            "question": "Who was {it}?",
        }
    )
    assert ours == theirs == [message.text for message in plain.to_messages()]


def test_system_human_human_reaches_the_template_alternating(
    llm: ChatMiniPIC, engine: FakeEngine
) -> None:
    llm.invoke([("system", "s"), ("human", "a"), ("human", [span_block("doc")]), ("human", "b")])
    assert engine.prompts[-1].messages == (
        Message("system", "s"),
        Message("user", [Text("a\n\n"), Span("doc"), Text("\n\nb")]),
    )


def test_history_with_documents_keeps_its_spans(
    llm: ChatMiniPIC, engine: FakeEngine, prompt: SpanPromptTemplate
) -> None:
    first = prompt.invoke({"context": DOCUMENTS, "question": "Who is {context}?"}).to_messages()
    history = [*first, llm.invoke(first)]
    following = SpanPromptTemplate([("placeholder", "{history}"), ("human", "{question}")])
    (following | llm).invoke({"history": history, "question": "And {context_str}?"})
    assert engine.prompts[-1].spans == engine.prompts[0].spans
    assert engine.prompts[-1].messages[-1].parts == (Text("And {context_str}?"),)


# Warm, explain, close


def test_warm_formats_documents_as_the_prompt_does(
    llm: ChatMiniPIC, prompt: SpanPromptTemplate
) -> None:
    titled = SpanPromptTemplate(
        prompt.messages,
        document_prompt=PromptTemplate.from_template("Title: {title}\n{page_content}"),
    )
    documents = [
        Document(f"\n\nContent {n}.\n", metadata={"title": f"Title {n}"}) for n in range(3)
    ]
    assert llm.warm(documents, titled).num_spans == 3
    assert asyncio.run(llm.awarm(documents, titled)).num_computed_tokens == 0
    value = titled.invoke({"context": documents, "question": "x"})
    states = [row.state for row in llm.explain(value, late=0).rows if row.kind == "span"]
    assert states == ["warm"] * 3


def test_warm_takes_texts_scores_and_any_prompt(llm: ChatMiniPIC) -> None:
    behind = [HumanMessage(["Look: ", span_block("?")])]
    assert llm.warm(["a", "b", " \n"], behind).num_spans == 2
    assert llm.warm([(Document("a"), 0.5), "c"], behind).num_cached_tokens == 16
    assert llm.warm(["a"], to_backend()).num_spans == 1
    plain = ChatPromptTemplate([("system", "s"), ("human", "{context} {q}")])
    assert llm.warm(["a"], plain).num_spans == 1
    with pytest.raises(PromptError, match="Element 1 is neither"):
        llm.warm(["a", 3], behind)  # type: ignore[list-item]


def to_backend() -> Prompt:
    return Prompt.chat([Message("user", [Text("Look: "), Span("?")])])


def test_warm_ignores_sampling_options_of_the_model(engine: FakeEngine) -> None:
    llm = ChatMiniPIC(model="m", engine=engine, temperature=0, stop=["x"], late=0)
    assert llm.warm(["a"], to_backend(), cache_salt="s").num_spans == 1
    with pytest.raises(ConfigurationError):
        llm.warm(["a"], to_backend(), colour="red")


def test_explain_takes_strings_and_messages(llm: ChatMiniPIC) -> None:
    assert llm.explain("x").rows[0].preview == "<user> x <assistant>"
    assert llm.explain([("human", "x")]) == llm.explain("x")


def test_token_counts_are_the_engines(llm: ChatMiniPIC, engine: FakeEngine) -> None:
    assert llm.get_num_tokens("one two") == 2
    assert llm.get_token_ids("one two") == engine.token_ids("one two")
    assert llm.get_num_tokens_from_messages([HumanMessage("one two")]) == 3  # "Human: one two"
    custom = ChatMiniPIC(model="m", engine=engine, custom_get_token_ids=lambda text: [7])
    assert (custom.get_token_ids("one two"), custom.get_num_tokens("one two")) == ([7], 1)


def test_close_leaves_an_injected_engine_open(llm: ChatMiniPIC, engine: FakeEngine) -> None:
    with llm:
        llm.invoke("x")
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.invoke("x")
    assert not engine.closed


def test_model_name_comes_from_an_injected_engine(engine: FakeEngine) -> None:
    assert ChatMiniPIC(engine=engine).model == "fake-model"  # type: ignore[call-arg]


def test_tracing_parameters(llm: ChatMiniPIC) -> None:
    assert llm._get_ls_params(stop=["x"], temperature=0.5) == {
        "ls_provider": "minipic",
        "ls_model_name": "m",
        "ls_model_type": "chat",
        "ls_temperature": 0.5,
        "ls_stop": ["x"],
    }
