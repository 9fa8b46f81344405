"""A prompt's documents, and the texts before, between and behind them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from minipic_backend.errors import PromptError, shown
from minipic_backend.layout.rendering import Piece
from minipic_backend.layout.tokens import TextEncoder
from minipic_backend.prompt import Span

__all__ = [
    "Document",
    "Section",
    "best_last",
    "canonical_document",
    "end_line",
    "late_documents",
    "read_sections",
]

_LEADING_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")


def canonical_document(text: str) -> str:
    """A document as it is encoded: without leading blank lines and trailing white space, ended
    with a blank line. Nothing else changes."""
    if not isinstance(text, str):
        raise PromptError(f"A document is a str, not {type(text).__name__}: {shown(text)}")
    return _LEADING_BLANK_LINES.sub("", text.rstrip()) + "\n\n"


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A document of one prompt; two of the same text are two."""

    span: Span
    label: str

    @property
    def text(self) -> str:
        """In canonical form."""
        return canonical_document(self.span.text)


@dataclass(slots=True)
class Section:
    """A run of documents and the marked text behind it."""

    documents: list[Document] = field(default_factory=list)
    text: str = ""


def read_sections(pieces: Iterable[Piece], encoder: TextEncoder) -> tuple[str, list[Section]]:
    """Text before the first document, and the sections behind it."""
    head = ""
    sections: list[Section] = []
    ordinal = 0
    for piece in pieces:
        if isinstance(piece, Span):
            ordinal += 1
            if not sections:
                head = end_line(head, encoder)
                sections.append(Section())
            elif sections[-1].text:
                sections[-1].text = end_line(sections[-1].text, encoder)
                sections.append(Section())
            name = piece.id if piece.id is not None else ordinal
            sections[-1].documents.append(Document(piece, f"doc {name}"))
        elif sections:
            sections[-1].text = piece.lstrip()
        else:
            head = piece
    return head, sections


def end_line(text: str, encoder: TextEncoder) -> str:
    """A document starts on a line of its own, unless right behind a special token."""
    inline = text.rstrip(" \t")
    if not inline.strip():
        return ""
    if encoder.ends_special(inline):
        return text
    return inline if inline.endswith("\n") else inline + "\n\n"


def best_last(documents: Sequence[Document]) -> list[Document]:
    """Unranked documents in the order given, then the ranked ones, the best one last; of equal
    ranks, the one given first is the better."""
    return [one for one in documents if one.span.rank is None] + _ranked(documents)


def late_documents(documents: Sequence[Document], count: int) -> list[Document]:
    """The `count` best-ranked documents, the best one last."""
    ranked = _ranked(documents)
    return ranked[max(len(ranked) - count, 0) :]


def _ranked(documents: Sequence[Document]) -> list[Document]:
    ranked = [
        (document.span.rank, index, document)
        for index, document in enumerate(documents)
        if document.span.rank is not None
    ]
    return [document for _, _, document in sorted(ranked, reverse=True)]
