"""Messages of JSON clients, and the digest that proves two tokenizers equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import LLAMA_SPECIALS, LLAMA_TEMPLATE, SlowTokenizer, byte_level, metaspace

from minipic_backend import Message, PromptError, Span, Text
from minipic_backend.json_messages import has_marks, read_messages
from minipic_backend.layout.tokenizer_digest import tokenizer_digest


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def text(value: str, **further: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **further}


MARK = {"minipic": {"span": True, "rank": 2, "id": "a"}}


def test_marks_make_spans_wherever_they_stand() -> None:
    (message,) = read_messages(user(text("a", **MARK), text("b", extras=MARK), "c", text("d")))
    span = {"rank": 2, "id": "a"}
    assert message == Message("user", [Span("a", **span), Span("b", **span), Text("c"), Text("d")])


def test_texts_are_kept_apart_spans_are_not() -> None:
    (message,) = read_messages(user(text("a"), text("b"), text("c", **MARK)), between_texts="\n")
    assert [part.text for part in message.parts] == ["a", "\n", "b", "c"]


def test_reasoning_of_an_earlier_answer_is_left_to_the_template() -> None:
    content = [{"type": "thinking", "thinking": "hm"}, text("a")]
    (message,) = read_messages([{"role": "assistant", "content": content, "reasoning": "hm"}])
    assert message == Message("assistant", [Text("a")], {"reasoning": "hm"})


def test_arguments_of_tool_calls_become_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    (message,) = read_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message.extra["tool_calls"][0]["function"]["arguments"] == {"x": 1}


@pytest.mark.parametrize(
    ("calls", "where"),
    [
        (3, "tool_calls: expected a list"),
        ([3], r"tool_calls\[0\]"),
        ([{"function": {"arguments": "{"}}], r"tool_calls\[0\]\.function\.arguments"),
    ],
    ids=str,
)
def test_bad_tool_calls(calls: Any, where: str) -> None:
    with pytest.raises(PromptError, match=where):
        read_messages([{"role": "assistant", "content": "", "tool_calls": calls}])


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        (user(text("a")), False),
        (user(text("a", extras={"other": 1}), "b"), False),
        ([{"role": "user", "content": "minipic"}, 3, {"content": 3}], False),
        (user(text("a", **MARK)), True),
        (user(text("a", extras=MARK)), True),
        (user(text("a", minipic=3)), True),  # malformed: to be refused, not overlooked
        ([{"role": "user", "content": "a", **MARK}], True),  # so is one in the wrong place
        ([{"role": "user", "content": "a", "extras": MARK}], True),
    ],
)
def test_has_marks(messages: Any, found: bool) -> None:
    assert has_marks(messages) is found


@pytest.mark.parametrize("mark", [MARK, {"extras": MARK}, {"minipic": 3}], ids=str)
@pytest.mark.parametrize("content", ["a", [text("a", **MARK)]], ids=["text", "parts"])
def test_a_mark_on_a_message_is_refused(mark: Any, content: Any) -> None:
    """It would otherwise be overlooked, and the document be no span."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content, **mark}]
    with pytest.raises(PromptError, match=r"messages\[1\]: a mark stands on a part"):
        read_messages(messages)


def make(specials: Any = LLAMA_SPECIALS, template: str = LLAMA_TEMPLATE) -> Any:
    return byte_level(specials, template, bos=None)


def test_digest_is_that_of_the_same_files_again(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = make()
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    again.encode("long " * 50, truncation=True, max_length=8)  # leaves a trace in its backend
    assert tokenizer_digest(again) == tokenizer_digest(tokenizer)


def test_digest_tells_tokenizers_apart() -> None:
    tokenizers = [
        make(),
        make(template=LLAMA_TEMPLATE + " "),
        make(specials=(*LLAMA_SPECIALS, "<|one_more|>")),
        make(specials=LLAMA_SPECIALS[::-1]),
        byte_level(LLAMA_SPECIALS, LLAMA_TEMPLATE, bos="<|begin_of_text|>"),
        metaspace(("<s>", "</s>"), LLAMA_TEMPLATE, bos="<s>"),
        SlowTokenizer(),
    ]
    digests = [tokenizer_digest(tokenizer) for tokenizer in tokenizers]
    assert len(set(digests)) == len(tokenizers)
    assert all(digest.isalnum() for digest in digests)
