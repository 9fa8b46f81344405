"""Text that is no Unicode: half of a surrogate pair by itself, which no tokenizer can encode."""

from __future__ import annotations

from collections.abc import Iterable

from minipic_backend.errors import PromptError, shown
from minipic_backend.prompt import Prompt, Span

__all__ = ["check_documents", "check_encodable", "check_prompt"]

_SHOWN = 20
"""Characters on either side of it that a message shows."""


def check_encodable(text: str, owner: str) -> None:
    """Refuses a lone surrogate.

    Args:
        text: what will be encoded.
        owner: whose text it is, for the message.

    Raises:
        PromptError: names owner, character and index.
    """
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        index = error.start
        around = text[max(0, index - _SHOWN) : index + 1 + _SHOWN]
        raise PromptError(
            f"{owner} cannot be encoded: it has \\u{ord(text[index]):04x} at index {index}, half "
            f"of a surrogate pair by itself, here: {shown(around)}. Remove it where the text is "
            "read, such as by decoding with errors='replace'"
        ) from error


def check_documents(texts: Iterable[object]) -> None:
    """`check_encodable` for each of a list of documents, named by its place, counted from 1. What
    is no str is left to whoever encodes it."""
    for place, text in enumerate(texts, 1):
        if isinstance(text, str):
            check_encodable(text, f"Document {place}")


def check_prompt(prompt: Prompt) -> None:
    """`check_encodable` for documents and texts of a prompt, named by place, counted from 1."""
    document = 0
    holders = [
        (f"Message {n} ({shown(m.role)})", m.parts) for n, m in enumerate(prompt.messages, 1)
    ]
    for name, parts in holders or [("The prompt's text", prompt.parts)]:
        for part in parts:
            owner = name
            if isinstance(part, Span):
                document += 1
                owner = f"Document {document}"
                owner += f" (id {shown(part.id)})" if part.id is not None else ""
            check_encodable(part.text, owner)
