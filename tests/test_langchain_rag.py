"""RAG chains as users write them, and what goes with them: warm, explain, close."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, trim_messages
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_minipic import ChatMiniPIC, SpanPromptTemplate, span_block
from langchain_support import ANSWER, DOCUMENTS, Retriever

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


def test_warm_takes_one_document_or_text(
    llm: ChatMiniPIC, engine: FakeEngine, prompt: SpanPromptTemplate
) -> None:
    """Both are iterable, in a way that nobody means."""
    behind = [HumanMessage(["Look: ", span_block("?")])]
    assert llm.warm("A text.", behind).num_spans == 1
    assert llm.warm(Document("A text."), behind).num_computed_tokens == 0
    assert llm.warm(Document("Another."), prompt).num_spans == 1
    assert engine.warm("A text.", prompt=to_backend()).num_computed_tokens == 0


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


def test_compare_shows_each_techniques_answer(llm: ChatMiniPIC, engine: FakeEngine) -> None:
    comparison = llm.compare([("human", "x")], ["full", "primed:late=2"], max_tokens=3)
    assert [answer.technique for answer in comparison.answers] == ["full", "primed:late=2"]
    assert all(answer.same_text for answer in comparison.answers)
    assert len(str(comparison).splitlines()) == 3
    options = [call.options for call in engine.calls]
    assert [call["technique"] for call in options] == ["full", "full", "primed"]
    assert options[-1]["late"] == 2
    assert {call["max_tokens"] for call in options} == {3}


def test_token_counts_are_the_engines(llm: ChatMiniPIC, engine: FakeEngine) -> None:
    assert llm.get_num_tokens("one two") == 2
    assert llm.get_token_ids("one two") == engine.token_ids("one two")
    # The fake's template: a line "<user>", the text, a line "<assistant>".
    assert llm.get_num_tokens_from_messages([HumanMessage("one two")]) == 5
    assert llm.get_num_tokens_from_messages([]) == 0
    assert llm.get_num_tokens_from_messages([("human", "one two")]) == 5
    messages = [HumanMessage("old " * 50), AIMessage("ok"), HumanMessage("new")]
    kept = trim_messages(messages, max_tokens=20, token_counter=llm, start_on="human")
    assert kept == messages[2:]
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
