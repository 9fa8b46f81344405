"""Agents whose tools give documents."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.chat_models import init_chat_model
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import StructuredTool, Tool, create_retriever_tool, tool
from langchain_minipic import ChatMiniPIC, register_provider, span_blocks
from langchain_minipic._document_tools import keeping_documents
from langchain_minipic.middleware import SpanMiddleware
from langchain_support import DOCUMENTS, Retriever
from pydantic import BaseModel

from minipic_backend import ConfigurationError, Prompt
from minipic_backend.testing import FakeEngine

TEXTS = [document.page_content for document in DOCUMENTS]
SEARCH = '<tool_call>\n{"name": "search", "arguments": {"query": "queen"}}\n</tool_call>'


def scripted(*answers: str) -> ChatMiniPIC:
    return ChatMiniPIC(model="m", engine=FakeEngine(list(answers)))


def engine(llm: ChatMiniPIC) -> FakeEngine:
    assert isinstance(llm.engine, FakeEngine)
    return llm.engine


def spans(prompt: Prompt) -> list[str]:
    return [span.text for span in prompt.spans]


@tool
def search(query: str) -> list[dict[str, Any]]:
    """Find documents."""
    return span_blocks(DOCUMENTS)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_tool_gives_documents(asynchronous: bool) -> None:
    llm = scripted(SEARCH, "Teutberga.")
    agent = create_agent(llm, [search], system_prompt="Be brief.")
    question = {"messages": [HumanMessage("Who was the queen?")]}
    state = await agent.ainvoke(question) if asynchronous else agent.invoke(question)
    assert state["messages"][-1].content == "Teutberga."
    first, second = engine(llm).prompts
    assert not first.spans
    assert spans(second) == TEXTS
    assert [span.rank for span in second.spans] == [0, 1, 2]


def test_a_tool_gives_documents_as_its_artifact() -> None:
    llm = scripted(SEARCH, "Teutberga.")
    retrieve = create_retriever_tool(
        Retriever(), "search", "Find documents.", response_format="content_and_artifact"
    )
    state = create_agent(llm, [retrieve]).invoke({"messages": [HumanMessage("Who?")]})
    (message,) = (one for one in state["messages"] if isinstance(one, ToolMessage))
    prompt = engine(llm).prompts[-1]
    assert set(spans(prompt)) == set(TEXTS)
    shown = "".join(part.text for part in prompt.messages[-1].parts)
    assert shown == message.content  # word for word


def test_an_artifact_that_is_not_in_the_content_is_left_alone() -> None:
    llm = scripted("x")
    message = ToolMessage("Found 2.", tool_call_id="1", artifact=[*DOCUMENTS, "other"])
    call = {"name": "search", "args": {}, "id": "1"}
    llm.invoke([HumanMessage("x"), AIMessage("", tool_calls=[call]), message])
    assert not engine(llm).prompts[-1].spans


@pytest.mark.parametrize("kind", ["human", "system", "tool"])
def test_cache_control_on_messages(kind: str) -> None:
    """Anthropic's wish is ours, except for the prefix and the question."""
    llm = scripted("x")
    block = {"type": "text", "text": "Large.", "cache_control": {"type": "ephemeral"}}
    call = {"name": "search", "args": {}, "id": "1"}
    head: list[Any] = {
        "human": [HumanMessage([block])],
        "system": [SystemMessage(["Be brief.", block])],
        "tool": [AIMessage("", tool_calls=[call]), ToolMessage([block], tool_call_id="1")],
    }[kind]
    llm.invoke([*head, AIMessage("ok"), HumanMessage("Question?")])
    assert spans(engine(llm).prompts[-1]) == ["Large."]


def test_an_agent_that_must_answer_in_a_structure() -> None:
    class Queen(BaseModel):
        """A queen."""

        name: str

    llm = scripted('[{"name": "Queen", "arguments": {"name": "Teutberga"}}]')
    agent = create_agent(llm, [search], response_format=Queen)
    state = agent.invoke({"messages": [HumanMessage("Who?")]})
    assert state["structured_response"] == Queen(name="Teutberga")
    held = json.loads(engine(llm).calls[0].options["structured_outputs"]["structural_tag"])
    names = [
        json.loads(tag["begin"].split('"name": ')[1].split(",")[0])
        for tag in held["format"]["tags"]
    ]
    assert names == ["search", "Queen"]


LONG = "A long result of a tool. " * 30


@tool
def read_file(name: str) -> str:
    """Read a file."""
    return LONG


def test_middleware_marks_large_results_and_leaves_the_state_alone() -> None:
    call = '<tool_call>{"name": "read_file", "arguments": {"name": "a"}}</tool_call>'
    llm = scripted(call, "Done.")
    agent = create_agent(llm, [read_file], middleware=[SpanMiddleware(frame="none")])
    state = agent.invoke({"messages": [HumanMessage("Read it. " * 100)]})
    assert spans(engine(llm).prompts[-1]) == [LONG.strip()]
    assert engine(llm).calls[-1].options["frame"] == "none"
    assert state["messages"][2].content == LONG


def find(query: str) -> list[Document]:
    """Find documents."""
    return DOCUMENTS


async def afind(query: str) -> Any:
    """Find documents."""
    return [(document, 0.5) for document in DOCUMENTS]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_middleware_keeps_documents_that_a_tool_returns(asynchronous: bool) -> None:
    """LangChain would print them in Python's notation."""
    llm = scripted(SEARCH, "Teutberga.")
    given = StructuredTool.from_function(find, afind, name="search")
    agent = create_agent(llm, [given], middleware=[SpanMiddleware()])
    question = {"messages": [HumanMessage("Who was the queen?")]}
    state = await agent.ainvoke(question) if asynchronous else agent.invoke(question)
    prompt = engine(llm).prompts[-1]
    assert spans(prompt) == TEXTS
    assert [span.rank for span in prompt.spans] == [0, 1, 2]
    (message,) = (one for one in state["messages"] if isinstance(one, ToolMessage))
    assert message.text == "\n\n".join(TEXTS)
    assert given.func is find  # the agent's own tool is left alone


class Documents(deque[Any]):
    """Neither a list nor an iterator."""


def one_by_one() -> Iterator[Document]:
    yield from DOCUMENTS


@pytest.mark.parametrize(
    "give",
    [
        one_by_one,
        lambda: iter(DOCUMENTS),
        lambda: ((document, 0.5) for document in DOCUMENTS),
        lambda: filter(None, DOCUMENTS),
        lambda: dict(enumerate(DOCUMENTS)).values(),
        lambda: Documents(DOCUMENTS),
        lambda: tuple(DOCUMENTS),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_middleware_keeps_documents_however_a_tool_yields_them(
    give: Any, asynchronous: bool
) -> None:
    def find(query: str) -> Any:
        """Find documents."""
        return give()

    async def afind(query: str) -> Any:
        """Find documents."""
        return give()

    llm = scripted(SEARCH, "Teutberga.")
    given = StructuredTool.from_function(find, afind, name="search")
    agent = create_agent(llm, [given], middleware=[SpanMiddleware()])
    question = {"messages": [HumanMessage("Who was the queen?")]}
    await agent.ainvoke(question) if asynchronous else agent.invoke(question)
    assert spans(engine(llm).prompts[-1]) == TEXTS


async def test_middleware_keeps_documents_of_an_asynchronous_generator() -> None:
    async def in_turn() -> Any:
        for document in DOCUMENTS:
            yield document

    async def afind(query: str) -> Any:
        """Find documents."""
        return in_turn()

    llm = scripted(SEARCH, "Teutberga.")
    given = StructuredTool.from_function(coroutine=afind, name="search")
    agent = create_agent(llm, [given], middleware=[SpanMiddleware()])
    await agent.ainvoke({"messages": [HumanMessage("Who was the queen?")]})
    assert spans(engine(llm).prompts[-1]) == TEXTS


def test_a_generator_of_other_things_yields_all_of_them() -> None:
    for items in ([], [None, 1], ["a", "b"], [1, DOCUMENTS[0]]):
        given = Tool("search", lambda _, items=items: iter(items), "Search.")
        kept = keeping_documents(given)
        assert isinstance(kept, Tool)
        assert kept.func is not None
        assert list(kept.func("x")) == items


@pytest.mark.parametrize("result", ["plain", ["a", "b"], [DOCUMENTS[0], "a"], [], {"x": 1}])
def test_middleware_leaves_other_results_alone(result: Any) -> None:
    def give(query: str) -> Any:
        """Gives."""
        return result

    messages = []
    for middleware in ([], [SpanMiddleware()]):
        given = StructuredTool.from_function(give, name="search")
        agent = create_agent(scripted(SEARCH, "x"), [given], middleware=middleware)
        state = agent.invoke({"messages": [HumanMessage("Who?")]})
        messages.append(next(one for one in state["messages"] if isinstance(one, ToolMessage)))
    assert messages[0].content == messages[1].content


async def test_middleware_asynchronously() -> None:
    llm = scripted("Done.")
    agent = create_agent(llm, [], middleware=[SpanMiddleware()])
    history = [HumanMessage("Long. " * 100), AIMessage("ok"), HumanMessage("Short?")]
    await agent.ainvoke({"messages": history})
    assert spans(engine(llm).prompts[-1]) == [("Long. " * 100).strip()]


def messages() -> Iterator[tuple[SpanMiddleware, Any, bool]]:
    question = HumanMessage("?")
    long = ToolMessage(LONG, tool_call_id="1", name="read_file")
    yield SpanMiddleware(), [long, question], True
    yield SpanMiddleware(tools=["other"]), [long, question], False
    yield SpanMiddleware(tools=["read_file"]), [long, question], True
    yield SpanMiddleware(min_chars=10_000), [long, question], False
    yield SpanMiddleware(humans=False), [HumanMessage(LONG), question], False
    yield SpanMiddleware(), [HumanMessage([{"type": "text", "text": LONG}]), question], True
    yield SpanMiddleware(), [HumanMessage(LONG)], False
    yield SpanMiddleware(), [AIMessage(LONG), question], False


@pytest.mark.parametrize(("middleware", "given", "marked"), list(messages()))
def test_what_middleware_marks(middleware: SpanMiddleware, given: Any, marked: bool) -> None:
    before = [message.model_copy(deep=True) for message in given]
    llm = scripted("x")
    result = middleware.mark(given)
    assert (result != given) == marked
    assert given == before
    assert [message.text for message in result] == [message.text for message in given]
    llm.invoke(result)
    assert bool(engine(llm).prompts[-1].spans) == marked


def test_middleware_refuses_nonsense() -> None:
    with pytest.raises(ConfigurationError, match="min_chars"):
        SpanMiddleware(min_chars=0)


def test_init_chat_model() -> None:
    register_provider()
    register_provider()
    llm = init_chat_model("minipic:some/name", temperature=0)
    assert isinstance(llm, ChatMiniPIC)
    assert (llm.model, llm.temperature) == ("some/name", 0)
