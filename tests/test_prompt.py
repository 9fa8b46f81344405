"""What a prompt may be made of; all else is refused where it is made, in words."""

from __future__ import annotations

from typing import Any

import pytest

from minipic_backend import Message, Prompt, PromptError, Span, Text

JSON = {"role": "user", "content": "Who?"}


@pytest.mark.parametrize(
    "messages",
    [[JSON], [Message("user", "x"), JSON], [("user", "Who?")], ["Who?"], [None], [Text("Who?")],
     Message("user", "x"), "Who?", JSON, None, 3],
    ids=str,
)  # fmt: skip
def test_a_chat_is_a_list_of_messages(messages: Any) -> None:
    with pytest.raises(PromptError, match=r"A chat (holds|is a list of) Message"):
        Prompt.chat(messages)


@pytest.mark.parametrize("content", [JSON, {"a": Span("x")}, None, 3, object()], ids=str)
def test_content_is_text_and_spans(content: Any) -> None:
    for make in (lambda: Message("user", content), lambda: Prompt(content)):
        with pytest.raises(PromptError, match="Content is a str, a Text, a Span, or a list"):
            make()
    with pytest.raises(PromptError, match="A prompt holds Text and Span"):
        Message("user", [content])


def test_what_prompts_are_made_of() -> None:
    parts = (Text("a"), Span("b"))
    for given in (["a", Span("b")], parts, iter(parts)):
        assert Prompt(given).parts == parts
    assert Message("user", iter(parts)).parts == parts
    messages = [Message("user", parts)]
    assert Prompt.chat(iter(messages)).messages == tuple(messages)  # type: ignore[arg-type]
    assert Prompt.chat(messages).spans == (Span("b"),)
