"""LangChain messages become a prompt of text and spans."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_minipic import span_block, span_blocks
from langchain_minipic.messages import canonical, to_prompt

from minipic_backend import Message, Prompt, PromptError, Span, Text

CACHED = {"cache_control": {"type": "ephemeral"}}


def text(value: str, **keys: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **keys}


def test_roles() -> None:
    prompt = to_prompt(
        [
            SystemMessage("s"),
            HumanMessage("h"),
            AIMessage("a"),
            ChatMessage("c", role="critic"),
            ChatMessage("u", role="human"),
            AIMessageChunk(content="b"),
        ]
    )
    assert [(message.role, message.parts[0].text) for message in prompt.messages] == [
        ("system", "s"),
        ("user", "h"),
        ("assistant", "a"),
        ("critic", "c"),
        ("user", "u"),
        ("assistant", "b"),
    ]


def test_tool_calls_and_their_results() -> None:
    call = {"id": "1", "name": "search", "args": {"q": "x"}, "type": "tool_call"}
    prompt = to_prompt(
        [
            HumanMessage("h", name="Ann"),
            AIMessage([{"type": "tool_use", "id": "1"}], tool_calls=[call]),
            ToolMessage("found", tool_call_id="1", name="search"),
        ]
    )
    assert prompt.messages == (
        Message("user", "h", {"name": "Ann"}),
        Message(
            "assistant",
            [],
            {
                "tool_calls": [
                    {
                        "id": "1",
                        "type": "function",
                        "function": {"name": "search", "arguments": {"q": "x"}},
                    }
                ]
            },
        ),
        Message("tool", "found", {"name": "search", "tool_call_id": "1"}),
    )


def test_reasoning_is_not_part_of_the_answer() -> None:
    prompt = to_prompt(
        [HumanMessage("h"), AIMessage([{"type": "reasoning", "reasoning": "hm"}, text("a")])]
    )
    assert prompt.messages[1] == Message("assistant", "a", {"reasoning_content": "hm"})


@pytest.mark.parametrize("kind", [HumanMessage, SystemMessage])
def test_neighbours_of_one_role_are_merged(kind: type[BaseMessage]) -> None:
    block = span_block("doc")
    (message,) = to_prompt([kind("one"), kind([block, "two"]), kind(""), kind("three")]).messages
    assert message.parts == (Text("one\n\n"), Span("doc"), Text("two\n\nthree"))


def test_roles_alternate_after_system_human_human() -> None:
    prompt = to_prompt(
        [
            SystemMessage("s"),
            HumanMessage("a"),
            HumanMessage("b"),
            AIMessage("c"),
            HumanMessage("d"),
        ]
    )
    assert [m.role for m in prompt.messages] == ["system", "user", "assistant", "user"]


def test_named_neighbours_stay_apart() -> None:
    messages = [HumanMessage("a", name="Ann"), HumanMessage("b", name="Bob")]
    assert len(to_prompt(messages).messages) == 2


def test_results_of_parallel_tool_calls_stay_apart() -> None:
    results = [ToolMessage("a", tool_call_id="1"), ToolMessage("b", tool_call_id="2")]
    assert len(to_prompt([HumanMessage("h"), *results]).messages) == 3


def test_marked_blocks_become_spans() -> None:
    block = text("doc", extras={"minipic": {"span": True, "rank": 2, "id": "d"}, "other": 1})
    assert span_block("doc", rank=2, id="d")["extras"]["minipic"] == block["extras"]["minipic"]
    prompt = to_prompt([HumanMessage([block, text("q")])])
    assert prompt.messages[0].parts == (Span("doc", rank=2, id="d"), Text("q"))
    unmarked = text("doc", extras={"minipic": {"span": False}})
    assert not to_prompt([HumanMessage([unmarked, text("q")])]).spans


def test_span_blocks_of_documents_and_texts() -> None:
    blocks = span_blocks([Document("A.", id="a"), (Document("B."), 0.5), "C."])
    assert [block["text"] for block in blocks] == ["A.\n\n", "B.\n\n", "C."]
    assert [block["extras"]["minipic"].get("rank") for block in blocks] == [0, 1, 2]
    assert span_blocks(Document("A.")) == span_blocks("A.") == [span_block("A.", rank=0)]
    assert span_blocks([]) == []
    for wrong in ([Document("A."), None], [{"page_content": "A."}], [3]):
        with pytest.raises(PromptError, match="Element"):
            span_blocks(wrong)  # type: ignore[arg-type]


def test_whitespace_around_a_document_is_not_part_of_the_span() -> None:
    assert canonical("\n \n  code = 1 \n\n") == "  code = 1"
    prompt = to_prompt([HumanMessage([span_block("\n  doc\n\n"), span_block(" \n"), text("q")])])
    assert prompt.messages[0].parts == (Text("\n"), Span("  doc"), Text("\n\n \nq"))


def test_cache_control_is_the_same_wish() -> None:
    for mark in (CACHED, {"extras": CACHED}):
        messages = [HumanMessage([text("doc", **mark), text("q")])]
        assert to_prompt(messages).spans == (Span("doc"),)
    tool = ToolMessage([text("found", **CACHED)], tool_call_id="1")
    assert to_prompt([HumanMessage("h"), tool]).spans == (Span("found"),)


def test_cache_control_on_instructions_and_question_stays_text() -> None:
    """There it marks the end of a prefix, which vLLM caches by itself; isolating the question
    from the documents would ruin the answer."""
    prompt = to_prompt(
        [
            SystemMessage([text("rules", **CACHED), text("handbook", **CACHED)]),
            HumanMessage([text("doc", **CACHED), text("q", **CACHED)]),
        ]
    )
    assert prompt.spans == (Span("handbook"), Span("doc"))
    explicit = to_prompt([HumanMessage([span_block("doc")])])
    assert explicit.spans == (Span("doc"),)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "image_url"),
        ([{"type": "audio", "base64": ""}], "audio"),
        ([{"type": "reasoning", "reasoning": "x"}], "reasoning"),
        ([{"type": "text", "text": 3}], "instead of a str"),
        ([text("x", extras={"minipic": {"spam": True}})], "span, rank and id"),
        ([text("x", extras={"minipic": True})], "span, rank and id"),
        ([text("x", extras={"minipic": {"rank": -1}})], "rank"),
    ],
)
def test_what_cannot_be_sent_is_refused(content: Any, complaint: str) -> None:
    with pytest.raises(PromptError, match=complaint):
        to_prompt([HumanMessage(content)])


def test_no_messages_and_no_model_message() -> None:
    with pytest.raises(PromptError, match="no messages"):
        to_prompt([])
    with pytest.raises(PromptError, match="RemoveMessage"):
        to_prompt([RemoveMessage(id="1")])


def test_template_kwargs() -> None:
    prompt = to_prompt([HumanMessage("h")], template_kwargs={"enable_thinking": False})
    assert prompt == Prompt.chat([Message("user", "h")], template_kwargs={"enable_thinking": False})
