"""The LangChain classes on the real engine: one chain, every way to call it."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.tools import tool
from langchain_minipic import ChatMiniPIC, MiniPIC, SpanPromptTemplate
from langchain_minipic.middleware import SpanMiddleware
from langchain_model import model_params
from pydantic import BaseModel

from minipic_backend import EngineClosedError, Prompt, PromptError
from minipic_backend.prompt_cache import Module, Parameter, Schema

DOCUMENTS = [
    Document(
        f"The {colour} box holds {thing}. It stands in room {number}, on the shelf by the window, "
        "and nobody but the caretaker has a key to that room.",
        id=colour,
    )
    for number, (colour, thing) in enumerate(
        [("red", "coins"), ("blue", "letters"), ("green", "seeds"), ("white", "maps")], start=11
    )
]
QUESTION = "What does the blue box hold?"


class Rotating(BaseRetriever):
    """The same documents in another order each time."""

    turn: int = 0

    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        self.turn += 1
        return DOCUMENTS[self.turn % 4 :] + DOCUMENTS[: self.turn % 4]


@pytest.fixture(scope="module")
def llm() -> ChatMiniPIC:
    return ChatMiniPIC(**model_params(max_tokens=6))


@pytest.fixture(scope="module")
def prompt() -> SpanPromptTemplate:
    return SpanPromptTemplate.from_messages(
        [("system", "Answer from the documents."), ("human", "{context}\n\nQuestion: {question}")]
    )


@pytest.fixture(scope="module")
def chain(llm: ChatMiniPIC, prompt: SpanPromptTemplate) -> Runnable[Any, Any]:
    return {"context": Rotating(), "question": RunnablePassthrough()} | prompt | llm


def reset(llm: ChatMiniPIC) -> None:
    llm._get_engine().reset_cache()  # type: ignore[attr-defined]


def test_documents_are_read_in_any_order(llm: ChatMiniPIC, chain: Runnable[Any, Any]) -> None:
    reset(llm)
    details = [chain.invoke(QUESTION).usage_metadata["input_token_details"] for _ in range(3)]
    assert details[0]["cache_read"] == 0
    assert details[0]["cache_creation"] > 0
    # From the third on, each document was a span at least once: only the late one is computed.
    spans = details[-1]["cache_read"]
    assert spans > 0.8 * details[0]["cache_creation"]


def test_every_way_to_call_gives_the_same_answer(
    llm: ChatMiniPIC, prompt: SpanPromptTemplate
) -> None:
    value = prompt.invoke({"context": DOCUMENTS, "question": QUESTION})

    async def astream() -> list[Any]:
        return [chunk async for chunk in llm.astream(value)]

    whole = llm.invoke(value)
    for chunks in (list(llm.stream(value)), asyncio.run(astream())):
        assert len(chunks) > 2
        assert "".join(chunk.content for chunk in chunks) == whole.content
        assert chunks[-1].usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    others = [*llm.batch([value] * 2), *asyncio.run(llm.abatch([value] * 2))]
    assert {message.content for message in others} == {whole.content}


def test_warm_and_explain(llm: ChatMiniPIC, prompt: SpanPromptTemplate) -> None:
    reset(llm)
    assert llm.warm(DOCUMENTS, prompt).num_spans == len(DOCUMENTS)
    value = prompt.invoke({"context": DOCUMENTS[::-1], "question": QUESTION})
    rows = llm.explain(value).rows
    assert [row.state for row in rows] == ["warm"] * 4 + ["cold"]
    usage = llm.invoke(value).usage_metadata
    assert usage["input_token_details"]["cache_read"] == sum(row.num_tokens for row in rows[:-1])


def test_a_schemas_prompt(llm: ChatMiniPIC) -> None:
    """Modules at reserved positions, through the chain; new arguments are all that is computed."""
    reset(llm)
    schema = Schema(
        "boxes",
        [
            Module("red", [DOCUMENTS[0].page_content, " Today is ", Parameter("day", 4), "."]),
            Module("blue", DOCUMENTS[1].page_content),
        ],
        system="Answer from the documents.",
    )

    def ask(day: str) -> Prompt:
        return schema.prompt(QUESTION, {"red": {"day": day}, "blue": {}})

    chain = RunnableLambda(ask) | llm.bind(technique="prompt_cache")
    cold = chain.invoke("Monday")
    engine: Any = llm._get_engine()
    expected = engine.generate(
        ask("Monday"), technique="prompt_cache", temperature=0, max_tokens=llm.max_tokens
    )
    assert cold.content == expected.completions[0].text
    assert cold.usage_metadata["input_token_details"]["cache_read"] == 0
    rows = llm.explain(ask("Friday"), technique="prompt_cache").rows
    spans = [row for row in rows if row.kind == "span"]
    assert [row.state for row in spans] == ["warm"] * len(spans)
    message = chain.invoke("Friday")
    details = message.usage_metadata["input_token_details"]
    assert details["cache_read"] == sum(row.cached_tokens for row in rows)
    assert "".join(piece.content for piece in chain.stream("Friday")) == message.content


def test_old_turns_of_a_chat_stay_hits(llm: ChatMiniPIC) -> None:
    """Documents, questions and answers: all but the last block or two of each earlier prompt."""
    reset(llm)
    prompt = SpanPromptTemplate.from_messages(
        [
            ("system", "Answer from the documents."),
            ("placeholder", "{history}"),
            ("human", "{context}\n\nQuestion: {question}"),
        ]
    )
    history: list[Any] = []
    before = 0
    for turn in range(3):
        documents = DOCUMENTS[turn : turn + 2]
        value = prompt.invoke({"history": history, "context": documents, "question": QUESTION})
        answer = llm.invoke(value, late=0)
        history += [value.to_messages()[-1], answer]
        usage = answer.usage_metadata
        assert usage["input_token_details"]["cache_read"] >= before - 2 * 32
        before = usage["input_tokens"]


@tool(response_format="content_and_artifact")
def search(colour: Literal["red", "blue", "green", "white"]) -> tuple[str, list[Document]]:
    """Find documents about the box of a colour."""
    return "\n\n".join(document.page_content for document in DOCUMENTS), DOCUMENTS


@wrap_model_call
def search_first(request: ModelRequest[Any], handler: Any) -> Any:
    """This small a model calls no tool of its own accord."""
    searched = isinstance(request.messages[-1], ToolMessage)
    return handler(request.override(tool_choice="none" if searched else "any"))


def test_what_a_tool_finds_is_shared_by_conversations(llm: ChatMiniPIC) -> None:
    reset(llm)
    model = llm.model_copy(update={"max_tokens": 48, "late": 0})
    agent = create_agent(model, [search], middleware=[search_first, SpanMiddleware(frame="none")])
    reads = []
    for question in (QUESTION, "And where does the red box stand?"):
        messages = agent.invoke({"messages": [HumanMessage(question)]})["messages"]
        assert isinstance(messages[-2], ToolMessage)
        assert messages[-2].artifact == DOCUMENTS
        reads.append(messages[-1].usage_metadata["input_token_details"]["cache_read"])
    rows = model.explain(messages[:-1], frame="none").rows
    spans = [row for row in rows if row.kind == "span"]
    assert [row.state for row in spans] == ["warm"] * 4
    assert reads[1] >= sum(row.num_tokens for row in spans)


class Box(BaseModel):
    """A box."""

    colour: Literal["red", "blue", "green", "white"]


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_structured_output_in_three_ways(llm: ChatMiniPIC, method: Any) -> None:
    chain = llm.with_structured_output(Box, method=method, max_tokens=60)
    assert isinstance(chain.invoke("The blue box is open. Which box is open?"), Box)


def test_strict_calls_and_plain_answers(llm: ChatMiniPIC) -> None:
    """Of its own accord: whatever it writes, it is an answer or a call that is valid."""
    answer = llm.bind_tools([search], strict=True, max_tokens=40).invoke("Say hello.")
    assert answer.content or answer.tool_calls
    assert not answer.invalid_tool_calls


def test_stop_and_max_tokens(llm: ChatMiniPIC) -> None:
    whole = llm.invoke("Count from one to twenty.")
    assert whole.response_metadata["finish_reason"] == "length"
    stop = whole.content[3:6]
    stopped = llm.invoke("Count from one to twenty.", stop=[stop])
    assert stopped.content == whole.content[: whole.content.index(stop)]
    pieces = list(llm.stream("Count from one to twenty.", stop=[stop]))
    assert "".join(piece.content for piece in pieces) == stopped.content


def test_timeout_and_bad_prompts_leave_it_serving(llm: ChatMiniPIC) -> None:
    slow = llm.model_copy(update={"timeout": 0.2, "max_tokens": 1500})
    with pytest.raises(TimeoutError):
        slow.invoke("Tell a long story.", ignore_eos=True)
    with pytest.raises(PromptError, match="2048"):
        llm.invoke("word " * 3000)
    assert llm.invoke("Say hello.").content


def test_text_model_shares_the_engine(llm: ChatMiniPIC) -> None:
    text = MiniPIC(**model_params(max_tokens=4))
    assert "Paris" in text.invoke("The capital of France is")
    assert text._get_engine() is llm._get_engine()
    text.close()
    with pytest.raises(EngineClosedError):
        text.invoke("x")
    assert llm.get_num_tokens("The capital of France is") == 5
    assert llm.invoke([HumanMessage("Say hello.")]).content
