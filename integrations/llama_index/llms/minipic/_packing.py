"""Whole nodes on their way through LlamaIndex, which knows them as `str` only.

A synthesizer hands text to a template, the template to the model. `PackedNodes` is that text, and
remembers its nodes; where a template prints it, marks stand around each of them, which the model
takes out again. The marks hold a number that no document can guess.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from typing import Any

from llama_index.llms.minipic._nodes import NodeText

__all__ = ["NodeTexts", "PackedNodes", "mark", "split_marks"]

_SEPARATOR = "\n\n"
_NONCE = secrets.token_hex(8)
_MARKED = re.compile(
    f"\ue000{_NONCE}:(?P<rank>\\d*):(?P<id>[0-9a-f]*)\ue001(?P<text>.*?)\ue000/{_NONCE}\ue001",
    re.DOTALL,
)
_STRAY = re.compile(f"\ue000{_NONCE}:\\d*:[0-9a-f]*\ue001|\ue000/{_NONCE}\ue001")


class PackedNodes(str):
    """Text of one or more nodes. Printed by a template, it has marks around each of them."""

    nodes: tuple[NodeText, ...]

    def __new__(cls, nodes: Iterable[NodeText]) -> PackedNodes:
        nodes = tuple(nodes)
        packed = super().__new__(cls, _SEPARATOR.join(node.text for node in nodes))
        packed.nodes = nodes
        return packed

    @property
    def plain(self) -> str:
        """The text, as any other model should get it."""
        return _SEPARATOR.join(node.text for node in self.nodes)

    def __str__(self) -> str:
        return _SEPARATOR.join(map(mark, self.nodes))

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __getnewargs__(self) -> tuple[Any, ...]:  # copies and pickles
        return (self.nodes,)


class NodeTexts(list[str]):
    """A list of texts that a template prints as text, and not as a list's repr."""

    def __str__(self) -> str:
        return _SEPARATOR.join(str(text) for text in self)


def mark(node: NodeText) -> str:
    """A node's text between marks."""
    rank = "" if node.rank is None else str(node.rank)
    id = (node.id or "").encode().hex()
    return f"\ue000{_NONCE}:{rank}:{id}\ue001{node.text}\ue000/{_NONCE}\ue001"


def split_marks(text: str) -> list[str | NodeText]:
    """Text and the nodes in it, in order; what is left of broken marks is dropped."""
    if _NONCE not in text:
        return [text]
    pieces: list[str | NodeText] = []
    done = 0
    for match in _MARKED.finditer(text):
        pieces.append(text[done : match.start()])
        rank = int(match["rank"]) if match["rank"] else None
        id = bytes.fromhex(match["id"]).decode() or None
        pieces.append(NodeText(_STRAY.sub("", match["text"]), rank, id))
        done = match.end()
    pieces.append(text[done:])
    cleaned = [_STRAY.sub("", piece) if isinstance(piece, str) else piece for piece in pieces]
    return [piece for piece in cleaned if piece]
