"""Questions as prompts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from minipic_backend.layout.ranking import BM25
from minipic_backend.prompt import Message, Part, Prompt, Span, Text
from minipic_backend.quality.passages import Passage
from minipic_backend.quality.questions import Question
from minipic_backend.quality.techniques import TechniqueSpec

__all__ = ["PromptForm"]

_SENTENCE_END = re.compile(r"(?<=[.!?]) +(?=[A-Z])")

_SYSTEM = (
    "Answer the question from the documents. Give the answer only, in as few words as possible: "
    "a name, a place, a year, yes or no."
)


@dataclass(frozen=True, slots=True)
class PromptForm:
    """How documents and questions are put to the model.

    Args:
        document: form of a document, with {title} and {text}.
        system: what stands before the documents.
        chat: make chats; False: plain text, for models without a chat template.
    """

    document: str = "{title}\n{text}"
    system: str = _SYSTEM
    chat: bool = True

    def show(self, passage: Passage) -> str:
        """A document as the model reads it."""
        return self.document.format(title=passage.title, text=passage.text).strip()

    def prompt(self, question: Question, spec: TechniqueSpec, ranks: tuple[int, ...]) -> Prompt:
        """The prompt that a technique answers, documents ranked by `ranks`."""
        shown = [
            Span(self.show(passage), rank=rank, id=str(number))
            for number, (passage, rank) in enumerate(zip(question.documents, ranks, strict=True))
        ]
        order = spec.prompt.get("order", "given")
        if order != "given":
            shown.sort(key=lambda span: span.rank or 0, reverse=order == "best_last")
        return self._around(shown, Text(self._closing(question, spec)))

    def other_prompt(self, question: Question, ranks: tuple[int, ...]) -> Prompt:
        """Another question over the same documents in another order: it makes their spans warm."""
        shown = [
            Span(self.show(passage), rank=rank)
            for passage, rank in zip(question.documents, ranks, strict=True)
        ]
        return self._around(shown[::-1], Text("Question: What do these documents have in common?"))

    def _closing(self, question: Question, spec: TechniqueSpec) -> str:
        digest = ""
        if spec.prompt.get("digest") == "titles":
            titles = "; ".join(passage.title for passage in question.documents)
            digest = f"The documents above are about: {titles}.\n\n"
        if spec.prompt.get("digest") == "quotes":
            digest = "From the documents above:\n" + "\n".join(_quotes(question)) + "\n\n"
        asked = "\n".join([f"Question: {question.text}"] * int(spec.prompt.get("repeat", 1)))
        return digest + asked + ("" if self.chat else "\nAnswer:")

    def _around(self, spans: list[Span], closing: Text) -> Prompt:
        parts: list[Part] = [*spans, closing]
        if self.chat:
            return Prompt.chat([Message("system", self.system), Message("user", parts)])
        return Prompt([Text(self.system + "\n\n"), *parts])


def _quotes(question: Question, count: int = 3) -> list[str]:
    """The sentences that share most with the question, each with its document's title."""
    sentences = [
        f"{passage.title}: {sentence}"
        for passage in question.documents
        for sentence in _SENTENCE_END.split(passage.text)
    ]
    ranks = BM25(sentences).ranks(question.text, sentences)
    best = sorted(range(len(sentences)), key=ranks.__getitem__)[:count]
    return [sentences[index] for index in sorted(best)]
