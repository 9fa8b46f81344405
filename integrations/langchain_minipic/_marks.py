"""Marks inside a plain text that say where documents stand in it.

Some of LangChain's chains join documents to one string before a prompt or a model sees them.
Marks come through that. They hold a name drawn at random for this process, so that no document
can forge one.
"""

from __future__ import annotations

import re
import secrets

__all__ = ["is_marked", "mark", "split_marked", "unmark"]

_NONCE = secrets.token_hex(8)
_START, _END = f"⟪span {_NONCE}⟫", f"⟪/span {_NONCE}⟫"
_SPAN = re.compile(f"{_START}(.*?){_END}", re.DOTALL)
_ANY = re.compile(f"{_START}|{_END}")


def mark(text: str) -> str:
    """`text` as a document inside a larger text."""
    return f"{_START}{unmark(text)}{_END}"


def is_marked(text: str) -> bool:
    """Whether documents are marked in `text`."""
    return _START in text


def split_marked(text: str) -> list[tuple[str, bool]]:
    """The text without marks, in pieces, each with whether it is a document. None is empty."""
    pieces = [(piece, place % 2 == 1) for place, piece in enumerate(_SPAN.split(text))]
    return [(unmark(piece), is_span) for piece, is_span in pieces if unmark(piece)]


def unmark(text: str) -> str:
    """The text without marks."""
    return _ANY.sub("", text)
