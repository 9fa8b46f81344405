"""Messages of LlamaIndex to prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ChatMessage,
    CitableBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.llms.minipic import MiniPIC, SpanPoint, span_blocks
from llama_index.llms.minipic._messages import to_prompt

from minipic_backend import PromptError, Span, Text
from minipic_backend.testing import FakeEngine

POINT = CachePoint(cache_control=CacheControl(type="ephemeral"))


def parts(*messages: ChatMessage) -> list[Any]:
    return [list(message.parts) for message in to_prompt(messages).messages]


def user(*blocks: Any) -> ChatMessage:
    return ChatMessage(role="user", blocks=list(blocks))


def test_a_cache_point_makes_the_block_before_it_a_span() -> None:
    message = user(TextBlock(text="\nDoc.\n"), POINT, TextBlock(text="Question?"))
    assert parts(message) == [[Text("\n"), Span("Doc."), Text("\nQuestion?")]]


def test_a_span_point_says_more() -> None:
    message = user(*span_blocks("Doc.", rank=2, id="d"), TextBlock(text="Question?"))
    assert parts(message) == [[Span("Doc.", rank=2, id="d"), Text("Question?")]]
    assert isinstance(message.blocks[1], CachePoint)


def test_prefix_and_question_are_no_spans_behind_a_plain_cache_point() -> None:
    """A cache point ends a prefix elsewhere: prompts made for that mean these two blocks."""
    system = ChatMessage(role="system", blocks=[TextBlock(text="Rules."), POINT])
    question = user(TextBlock(text="Question?"), POINT)
    assert parts(system, question) == [[Text("Rules.")], [Text("Question?")]]
    answer = ChatMessage(role="assistant", content="Yes.")
    assert parts(question, answer, question)[0] == [Span("Question?")]
    explicit = user(*span_blocks("Doc."))
    assert parts(explicit) == [[Span("Doc.")]]


def test_points_survive_a_dump_as_cache_points() -> None:
    message = user(*span_blocks("Doc.", rank=1), TextBlock(text="Question?"))
    again = ChatMessage.model_validate(json.loads(message.model_dump_json()))
    assert parts(again) == [[Span("Doc."), Text("Question?")]]
    copied = message.model_copy(deep=True)
    assert isinstance(copied.blocks[1], SpanPoint)


def test_a_lone_cache_point_and_one_behind_nothing_are_ignored() -> None:
    assert parts(user(POINT, TextBlock(text="Question?"))) == [[Text("Question?")]]
    assert parts(user(*span_blocks(" \n"), TextBlock(text="x"))) == [[Text(" \nx")]]


def test_citable_blocks_are_documents() -> None:
    block = CitableBlock(title="Title", source="file.txt", content="Body.")
    assert parts(user(block, TextBlock(text="Question?"))) == [
        [Span("Title\nBody.", id="file.txt"), Text("Question?")]
    ]


def test_text_blocks_are_joined_as_their_content_is() -> None:
    message = user(TextBlock(text="One."), TextBlock(text="Two."))
    assert parts(message) == [[Text(message.content or "")]] == [[Text("One.\nTwo.")]]


@pytest.mark.parametrize(
    ("role", "theirs"),
    [
        ("system", "system"),
        ("developer", "system"),
        ("user", "user"),
        ("assistant", "assistant"),
        ("model", "assistant"),
        ("chatbot", "assistant"),
        ("tool", "tool"),
        ("function", "tool"),
    ],
)
def test_roles(role: str, theirs: str) -> None:
    prompt = to_prompt([ChatMessage(role=MessageRole(role), content="x")])
    assert prompt.messages[0].role == theirs


def test_every_role_of_llamaindex_is_known() -> None:
    for role in MessageRole:
        to_prompt([ChatMessage(role=role, content="x")])


def test_neighbouring_turns_of_a_user_become_one() -> None:
    """A chat template may insist that roles alternate."""
    messages = [ChatMessage(content="One."), ChatMessage(content="Two.")]
    assert parts(*messages) == [[Text("One.\n\nTwo.")]]


def test_tool_calls_and_results() -> None:
    call = ToolCallBlock(tool_call_id="1", tool_name="look", tool_kwargs='{"at": "it"}')
    old_style = {"id": "1", "function": {"name": "look", "arguments": {"at": "it"}}}
    expected = {
        "id": "1",
        "type": "function",
        "function": {"name": "look", "arguments": {"at": "it"}},
    }
    for message in (
        ChatMessage(role="assistant", blocks=[TextBlock(text=""), call]),
        ChatMessage(role="assistant", additional_kwargs={"tool_calls": [old_style]}),
    ):
        prompt = to_prompt(
            [
                ChatMessage(content="Look."),
                message,
                ChatMessage(role="tool", content="Seen.", additional_kwargs={"tool_call_id": "1"}),
            ]
        )
        assert prompt.messages[1].extra == {"tool_calls": [expected]}
        assert prompt.messages[2].extra == {"tool_call_id": "1"}


def test_a_call_that_was_cut_off_is_sent_as_the_tool_got_it() -> None:
    call = ToolCallBlock(tool_name="look", tool_kwargs='{"at": "it", "for": "so')
    prompt = to_prompt([ChatMessage("Look."), ChatMessage(role="assistant", blocks=[call])])
    (sent,) = prompt.messages[1].extra["tool_calls"]
    assert sent["function"]["arguments"] == {"at": "it", "for": None}


def test_reasoning_goes_to_the_template_and_not_into_the_text() -> None:
    blocks = [ThinkingBlock(content="Hm."), TextBlock(text="Yes.")]
    prompt = to_prompt([ChatMessage(role="assistant", blocks=blocks)])
    assert list(prompt.messages[0].parts) == [Text("Yes.")]
    assert prompt.messages[0].extra == {"reasoning_content": "Hm."}


def test_pictures_and_empty_chats_are_refused() -> None:
    with pytest.raises(PromptError, match="image"):
        to_prompt([user(ImageBlock(url="http://x/y.png"))])
    with pytest.raises(PromptError, match="no messages"):
        to_prompt([])


def test_spans_in_any_message() -> None:
    tool = ChatMessage(role="tool", blocks=span_blocks("Result."))
    system = ChatMessage(role="system", blocks=[TextBlock(text="Rules."), *span_blocks("Doc.")])
    prompt = to_prompt([system, ChatMessage(content="Question?"), tool])
    assert [s.text for s in prompt.spans] == ["Doc.", "Result."]


def test_explain_takes_texts_messages_and_prompts() -> None:
    llm = MiniPIC(engine=FakeEngine())
    message = user(*span_blocks("Doc.", id="d"), TextBlock(text="Question?"))
    kinds = [row.kind for row in llm.explain([message]).rows]
    assert kinds == ["prefix", "span", "dependent"]
    assert [row.kind for row in llm.explain(to_prompt([message])).rows] == kinds
    assert len(llm.explain("Question?").rows) == 1
    full = llm.explain([message], technique="full")
    assert len(full.rows) == 1
