"""Tools, structured output and reasoning of ChatMiniPIC, on a fake engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_minipic import ChatMiniPIC
from langchain_support import collect, last_of
from pydantic import BaseModel

from minipic_backend import ConfigurationError
from minipic_backend.testing import FakeEngine


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def now() -> str:
    """The time."""
    return "noon"


class Person(BaseModel):
    """A person."""

    name: str
    age: int


CALL = 'Wait.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ARGUMENTS = {"a": 1, "b": 2}


def model(answer: str, **options: Any) -> ChatMiniPIC:
    return ChatMiniPIC(model="m", engine=FakeEngine(answer), **options)


def constraint(llm: ChatMiniPIC) -> Any:
    engine = llm.engine
    assert isinstance(engine, FakeEngine)
    return engine.calls[-1].options.get("structured_outputs")


def forced(llm: ChatMiniPIC) -> Any:
    """The structural tag that decoding was held to."""
    return json.loads(constraint(llm)["structural_tag"])["format"]


def ways(runnable: Any, value: Any = "x") -> list[AIMessage]:
    """The answer whole, streamed, and streamed asynchronously."""
    streams = list(runnable.stream(value)), collect(runnable.astream(value))
    return [runnable.invoke(value), *map(last_of, streams)]


def test_tool_calls_are_read_in_every_way() -> None:
    llm = model(CALL)
    for answer in ways(llm.bind_tools([add])):
        assert answer.content == "Wait."
        (call,) = answer.tool_calls
        assert (call["name"], call["args"]) == ("add", ARGUMENTS)
        assert call["id"]
    assert constraint(llm) is None


def test_without_tools_nothing_is_taken_for_a_call() -> None:
    assert {answer.content for answer in ways(model(CALL))} == {CALL}
    refused = model(CALL).bind_tools([add], tool_choice="none")
    assert not refused.invoke("x").tool_calls


def test_arguments_arrive_in_pieces() -> None:
    chunks = list(model(CALL).bind_tools([add]).stream("x"))
    pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert len(pieces) > 2
    assert [piece["name"] for piece in pieces] == ["add", *[None] * (len(pieces) - 1)]


@pytest.mark.parametrize("choice", ["any", "required", True, "add"])
def test_forced_tool_calls_are_not_left_as_text(choice: Any) -> None:
    llm = model('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>')
    for answer in ways(llm.bind_tools([add], tool_choice=choice)):
        assert answer.content == ""
        assert [(c["name"], c["args"]) for c in answer.tool_calls] == [("add", ARGUMENTS)]
    assert set(forced(llm)["content"]["json_schema"]["properties"]) == {"a", "b"}


def test_one_of_several_tools_is_forced() -> None:
    llm = model(
        '[{"name": "now", "arguments": {}}, {"name": "add", "arguments": {"a": 1, "b": 2}}]'
    )
    for answer in ways(llm.bind_tools([add, now], tool_choice="any")):
        assert [call["name"] for call in answer.tool_calls] == ["now", "add"]
    assert forced(llm)["at_least_one"]
    assert not forced(llm)["stop_after_first"]
    llm.bind_tools([add, now], tool_choice="any", parallel_tool_calls=False).invoke("x")
    assert forced(llm)["stop_after_first"]


def test_calls_cut_off_are_kept_as_invalid() -> None:
    """In streams, LangChain itself completes what was cut off."""
    answer = model('{"a": 1, "b"').bind_tools([add], tool_choice="any").invoke("x")
    assert not answer.tool_calls
    (call,) = answer.invalid_tool_calls
    assert (call["name"], call["args"]) == ("add", '{"a": 1, "b"')
    assert "no JSON" in call["error"]


def test_wrong_tools_are_refused_where_they_are_bound() -> None:
    with pytest.raises(ConfigurationError, match="sub"):
        model("x").bind_tools([add], tool_choice="sub")
    with pytest.raises(ConfigurationError, match="exclude"):
        model("x").bind_tools([add], tool_choice="any").invoke(
            "x", response_format={"type": "json_object"}
        )
    with pytest.raises(ConfigurationError, match="response_format"):
        model("x").invoke("x", response_format="json")


def test_tools_and_their_history_reach_the_prompt() -> None:
    llm = model("3")
    call = {"name": "add", "args": ARGUMENTS, "id": "c1", "type": "tool_call"}
    llm.bind_tools([add]).invoke(
        [
            HumanMessage("1 + 2?"),
            AIMessage("", tool_calls=[call]),
            ToolMessage("3", tool_call_id="c1"),
        ]
    )
    assert isinstance(llm.engine, FakeEngine)
    prompt = llm.engine.prompts[-1]
    assert [given["function"]["name"] for given in prompt.tools] == ["add"]
    assert prompt.messages[1].extra["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert prompt.messages[2].role == "tool"


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
@pytest.mark.parametrize("kind", ["pydantic", "dict", "dict without title"])
def test_structured_output(method: Any, kind: str) -> None:
    llm = model('{"name": "Ada", "age": 36}')
    schema: Any = Person if kind == "pydantic" else Person.model_json_schema()
    if kind == "dict without title":
        del schema["title"]
    expected = Person(name="Ada", age=36) if kind == "pydantic" else {"name": "Ada", "age": 36}
    chain = llm.with_structured_output(schema, method=method)
    assert chain.invoke("x") == expected
    held = constraint(llm)["json"] if method != "function_calling" else None
    held = held or forced(llm)["content"]["json_schema"]
    assert set(held["properties"]) == {"name", "age"}
    assert list(chain.stream("x"))[-1] == expected
    raw = llm.with_structured_output(schema, method=method, include_raw=True).invoke("x")
    assert isinstance(raw["raw"], AIMessage)
    assert (raw["parsed"], raw["parsing_error"]) == (expected, None)


def test_structured_output_that_fails_is_reported() -> None:
    llm = model('{"name": "Ada"')
    raw = llm.with_structured_output(Person, include_raw=True).invoke("x")
    assert raw["parsed"] is None
    assert raw["parsing_error"] is not None


def test_any_json() -> None:
    llm = model('{"x": 1}')
    assert llm.with_structured_output(method="json_mode").invoke("x") == {"x": 1}
    assert constraint(llm) == {"json_object": True}
    for wrong in ({"method": "xml", "schema": Person}, {"method": "json_schema"}):
        with pytest.raises(ConfigurationError, match="methods are"):
            llm.with_structured_output(**wrong)


def test_reasoning_is_kept() -> None:
    llm = model("<think>\nIt is easy.\n</think>\n\nYes.", reasoning_parser="think")
    for answer in ways(llm):
        assert answer.content == "Yes."
        assert answer.additional_kwargs["reasoning_content"] == "It is easy."
        assert answer.content_blocks[0] == {"type": "reasoning", "reasoning": "It is easy."}
    llm.invoke([HumanMessage("x"), answer, HumanMessage("Sure?")])
    assert isinstance(llm.engine, FakeEngine)
    assert llm.engine.prompts[-1].messages[1].extra["reasoning_content"] == "It is easy."


def test_each_answer_of_n_has_its_calls() -> None:
    engine = FakeEngine(['{"a": 1, "b": 2}', '{"a": 3, "b": 4}'])
    llm = ChatMiniPIC(model="m", engine=engine).bind_tools([add], tool_choice="any", n=2)
    result = llm.bound.generate([[HumanMessage("x")]], **llm.kwargs)  # type: ignore[attr-defined]
    calls = [generation.message.tool_calls[0]["args"]["a"] for generation in result.generations[0]]
    assert calls == [1, 3]


def test_profile() -> None:
    profile = model("x").profile
    assert profile["tool_calling"]
    assert profile["max_input_tokens"] == 4096
    embedded = ChatMiniPIC(model="some/name", engine_options={"max_model_len": 2048})
    assert embedded.profile["max_input_tokens"] == 2048
