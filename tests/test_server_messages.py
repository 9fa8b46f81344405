"""Anthropic's blocks as marked parts, without a server."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

from minipic_backend import PromptError
from minipic_backend.server.messages import SpanMessagesRequest, SpanServingMessages

CACHED = {"cache_control": {"type": "ephemeral"}}
SPAN = {"minipic": {"span": True}}


def text(value: str, **further: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **further}


def document(value: Any, **further: Any) -> dict[str, Any]:
    return {"type": "document", "source": {"type": "text", "data": value}, **further}


def convert(*messages: dict[str, Any], merge: bool = False, **further: Any) -> list[dict[str, Any]]:
    request = SpanMessagesRequest(model="m", max_tokens=5, messages=list(messages), **further)
    chat = SpanServingMessages.to_chat_completion_request(request, merge_inline_system=merge)
    return [{"role": m["role"], "content": m.get("content")} for m in chat.messages]


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def test_documents_and_cache_control_become_spans() -> None:
    assert convert(user(text("a", **CACHED), document("b"), text("q"))) == [
        user(text("a", **SPAN), text("b", **SPAN), text("q"))
    ]


def test_titles_and_contexts_belong_to_a_document() -> None:
    blocks = [document("b", title="T", context="C"), text("q")]
    assert convert(user(*blocks))[0]["content"][0] == text("T\nC\nb", **SPAN)
    parts = {"type": "content", "content": [text("x"), text("y")]}
    assert convert(user({"type": "document", "source": parts}))[0] == user(text("x\ny", **SPAN))


def test_the_last_block_of_a_message_is_its_question() -> None:
    """Clients mark the end of a conversation so; a document is one even there."""
    assert convert(user(document("a"), text("q", **CACHED)), user(text("r", **CACHED))) == [
        user(text("a", **SPAN), text("q")),
        {"role": "user", "content": "r"},
    ]
    assert convert(user(document("a"))) == [user(text("a", **SPAN))]


def test_a_text_that_comes_twice_keeps_its_mark_where_it_had_one() -> None:
    twice = text("a", **CACHED)
    assert convert(user(twice, twice)) == [user(text("a", **SPAN), text("a"))]
    system = convert(user(text("q")), system=[twice, twice])[0]
    assert system["content"] == [text("a"), text("a", **SPAN)]


@pytest.mark.parametrize("merge", [False, True])
def test_documents_of_the_system_prompt(merge: bool) -> None:
    system = [text("s", **CACHED), text("d", **CACHED)]
    inline = {"role": "system", "content": "later"}
    first, *rest = convert(user(text("q")), inline, system=system, merge=merge)
    assert first["content"][:2] == [text("s"), text("d", **SPAN)]
    assert len(rest) == (1 if merge else 2)
    assert len(first["content"]) == (3 if merge else 2)


def test_tool_results() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document("r"), text("more")]}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    found = convert(user(text("q")), {"role": "assistant", "content": [call]}, user(result))
    assert found[-1] == {"role": "tool", "content": [text("r", **SPAN), text("more")]}


def test_own_marks_and_options_pass() -> None:
    request = SpanMessagesRequest(
        model="m",
        max_tokens=5,
        messages=[user(text("a", minipic={"span": True, "rank": 1}), text("q"))],
        minipic={"late": 0},
    )
    chat = SpanServingMessages.to_chat_completion_request(request)
    assert chat.messages[0]["content"][0]["minipic"] == {"span": True, "rank": 1}
    assert chat.model_extra == {"minipic": {"late": 0}}


def test_a_mark_that_means_nothing_is_kept_to_be_refused() -> None:
    assert convert(user({**document("a"), "minipic": 0}, text("q")))[0]["content"] == [
        text("a", minipic=0),
        text("q"),
    ]
    image = {"type": "image", "source": {"type": "url", "url": "x"}}
    with pytest.raises(PromptError, match="image"):
        convert(user({**image, **SPAN}, text("q")))


def test_a_marked_tool_result_leaves_the_question_beside_it_alone() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "r", **SPAN}
    found = convert(user(result, text("q")))
    assert found == [
        {"role": "tool", "content": [text("r", **SPAN)]},
        {"role": "user", "content": "q"},
    ]


@pytest.mark.parametrize("where", ["message", "system", "tool result"])
@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"source": {"type": "text", "data": 3}}, "data is a string"),
        ({"source": {"type": "text"}}, "data is a string"),
        ({"source": "x"}, "source"),
        ({"source": ["x"]}, "source"),
        ({"source": {"type": "base64", "data": "AAAA"}}, "base64"),
        ({"source": {"type": "content", "content": 3}}, "list of text blocks"),
        ({"source": {"type": "content", "content": [3]}}, "list of text blocks"),
        ({"source": {"type": "content", "content": [text(3)]}}, "text is a string"),
        ({"source": {"type": "content", "content": [document("a")]}}, "list of text blocks"),
        ({"title": 3}, "title"),
        ({"context": ["c"]}, "context"),
    ],
    ids=str,
)
def test_broken_documents_are_refused_wherever_they_stand(
    where: str, broken: dict[str, Any], words: str
) -> None:
    """Blocks inside tool results have no schema but ours: any other error would be a failure."""
    block = {**document("a"), **broken}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    content = {"message": block, "system": text("q"), "tool result": result}[where]
    with pytest.raises(ValueError, match=words):  # ours, or the schema's
        convert(user(content, text("q")), system=[text("s"), block] if where == "system" else None)


def test_what_holds_no_text_is_no_span_wherever_it_stands() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "x"}}
    with pytest.raises(PromptError, match="image"):
        convert(user(text("q")), system=[text("s"), {**image, **SPAN}])
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{**image, **CACHED}]}
    assert convert(user(result, text("q")))[0] == {"role": "tool", "content": ""}


@pytest.mark.parametrize("block", [document("a"), text("a", **SPAN)], ids=["document", "mark"])
def test_documents_of_a_system_message_between_others_are_not_lost(block: dict[str, Any]) -> None:
    inline = {"role": "system", "content": [text("s", **CACHED), block]}
    with pytest.raises(ValueError, match=r"messages\[1\]: a system message"):
        convert(user(text("q")), inline)
    inline["content"].pop()
    assert convert(user(text("q")), inline)[1] == {"role": "system", "content": "s"}


def test_what_is_no_document_stays_what_it_is() -> None:
    """Agents put `cache_control` on all kinds of blocks."""
    image = {"type": "image", "source": {"type": "url", "url": "x"}, **CACHED}
    (message,) = convert(user(image, text("q")))
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}, **CACHED}
    answer = {"role": "assistant", "content": [text("a", **CACHED), text("b"), call]}
    assert convert(user(text("q")), answer)[1]["content"] == [text("a"), text("b")]
    billing = text("x-anthropic-billing-header: 1", **CACHED)
    system = [billing, text("s", **CACHED), text("d", **CACHED)]
    assert convert(user(text("q")), system=system)[0]["content"] == [text("s"), text("d", **SPAN)]


@pytest.mark.parametrize("system", [None, "s", [text("s"), text("t")]])
@pytest.mark.parametrize("content", ["hi", [text("hi")], [text("hi"), text("ho")]])
def test_without_marks_as_vllm_does_it(system: Any, content: Any) -> None:
    body = {"model": "m", "max_tokens": 5, "system": system, "stop_sequences": ["x"]}
    body["messages"] = [{"role": "user", "content": content}]
    ours = SpanServingMessages.to_chat_completion_request(SpanMessagesRequest(**body))
    stock = AnthropicServingMessages.to_chat_completion_request(AnthropicMessagesRequest(**body))
    left_out = {"request_id"}
    assert ours.model_dump(exclude=left_out) == stock.model_dump(exclude=left_out)
