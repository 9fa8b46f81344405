"""Small documents, different for each test, so that none finds another's in the cache."""

from __future__ import annotations

from functools import cache
from itertools import count
from pydoc_data.topics import topics

from minipic_backend import Message, Prompt, Span, Text

__all__ = ["chat", "fresh", "passages"]

_next = count()


@cache
def passages() -> tuple[str, ...]:
    """Paragraphs of the Python language reference, as Python itself carries it."""
    found = []
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            text = " ".join(paragraph.split())
            if 150 <= len(text) <= 250 and text.endswith("."):
                found.append(text)
    return tuple(found)


def fresh(number: int) -> list[str]:
    """Documents that nobody has seen before."""
    return [
        f"Entry {next(_next)}. {passages()[next(_next) % len(passages())]}" for _ in range(number)
    ]


def chat(documents: list[str], question: str = "What is this about?") -> Prompt:
    spans = [Span(document, rank=rank) for rank, document in enumerate(documents)]
    return Prompt.chat(
        [
            Message("system", "Answer from the documents."),
            Message("user", [*spans, Text(question)]),
        ]
    )
