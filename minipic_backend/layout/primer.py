"""The primer: stand-in documents at the end of the prefix.

A document that was computed with no other in front of it looks to the question like the first and
only one; ten of those confuse a model. Behind stand-ins they do less so, at no cost per request:
the primer is part of the prefix. Stand-ins that look like the documents do best (figures and
choice: docs/quality.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from minipic_backend.layout.ranking import as_text

__all__ = ["AUTO_PRIMER", "own_primer", "primer_passages"]

# Invented throughout: nothing here may pass for an answer. Two articles of an encyclopedia, each
# under its title: how most documents of a retriever look. Changing a character makes every cached
# span cold.
AUTO_PRIMER: tuple[str, str] = (
    "Kasimir Ellerelli\n"
    "Kasimir Ellerelli (2 March 1886 \u2013 27 March 1947) was a Czech botanist, born in "
    "Queensstead, Cordelia. Critics valued the early work most, of which 6 pieces survive. "
    "Ellerelli received the medal of the city of Clarburgh and never left the region again.",
    "The Winter Orchard of Harrowford\n"
    "The Winter Orchard of Harrowford is a 1994 Czech crime film directed by Bruno Holov. The film "
    "stars Jorun Norsen and was shown at 55 festivals. It tells of two sisters who inherit a mill "
    "near Ravenfield.",
)


def own_primer(documents: Iterable[str], count: int = 4) -> tuple[str, ...]:
    """A primer of the user's own documents, for `primer=`: those of middle length.

    They are in every prompt from then on, in front of its documents, which see them; the question
    does not, unless `see_primer=True`: then choose documents that nobody asks for.

    Args:
        documents: as the prompt shows them, title and all; a few hundred will do.
        count: how many. Four cost some 500 tokens of prefix, computed once.

    Raises:
        PromptError: what is no text.
    """
    texts = {as_text(document, "own_primer") for document in documents}
    ordered = sorted(texts, key=lambda text: (len(text), text))
    start = max(0, len(ordered) // 2 - count // 2)
    return tuple(ordered[start : start + count])


def primer_passages(primer: Literal["auto"] | tuple[str, ...] | None) -> tuple[str, ...]:
    """The passages that a `TechniqueSettings.primer` stands for."""
    if primer is None:
        return ()
    return AUTO_PRIMER if primer == "auto" else primer
