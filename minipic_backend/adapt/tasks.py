"""Questions over the user's documents, with answers, made by rule.

Two sources. Any document can be quoted from: "Quote the sentence that begins …" has an answer of
many tokens, each of which must be found in one document among others. And documents written like
an encyclopedia's state facts that `quality.kinds` asks for.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from minipic_backend.errors import ConfigurationError
from minipic_backend.prompt import Message, Part, Prompt, Span, Text
from minipic_backend.quality.passages import Passage
from minipic_backend.quality.questions import Question, make_questions

__all__ = ["Task", "TaskMaker", "split_documents"]

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])")
_SYSTEMS = (
    "Answer the question from the documents. Give the answer only, in as few words as possible.",
    "Answer from the documents.",
    "You are a helpful assistant. Use the passages below to answer.",
)
_MIN_WORDS, _MAX_WORDS = 8, 40
_NUM_CUE_WORDS = 4


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt with spans, and what should be answered."""

    prompt: Prompt
    answer: str


def split_documents(
    passages: Sequence[Passage], share: float, seed: int
) -> tuple[list[Passage], list[Passage]]:
    """Documents to train on, and others to validate on (at least two, at most half)."""
    shuffled = list(passages)
    random.Random(seed).shuffle(shuffled)
    num_held_out = min(max(round(share * len(shuffled)), 2), len(shuffled) // 2)
    return shuffled[num_held_out:], shuffled[:num_held_out]


class TaskMaker:
    """An endless supply of tasks over some documents.

    Args:
        passages: the documents; titles may be empty.
        kinds: kinds of `quality.kinds` to ask, where the documents state such facts; may be empty.
        max_documents: in one prompt.
        form: how a document is written out, with {title} and {text}.
        chat: make chats; False: plain text, for models without a chat template.
        seed: of every choice.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        *,
        kinds: Sequence[str] = (),
        max_documents: int = 10,
        form: str = "{title}\n{text}",
        chat: bool = True,
        seed: int = 0,
    ) -> None:
        self._rng = random.Random(seed)
        self._passages = list(passages)
        self._max_documents = min(max_documents, len(passages))
        self._form = form
        self._chat = chat
        self._quotable = [p for p in self._passages if _sentences(p)]
        self._questions = _ask(self._passages, kinds)
        if not (self._quotable or self._questions):
            raise ValueError("no document has a sentence of 8 to 40 words to quote")

    def next(self) -> Task:
        """A question about facts or a quotation, by turns at random."""
        if self._questions and (not self._quotable or self._rng.random() < 0.5):
            return self._fact(self._rng.choice(self._questions))
        return self._quotation(self._rng.choice(self._quotable))

    def _fact(self, question: Question) -> Task:
        own = [question.documents[index] for index in question.relevant]
        return self._task(own, f"Question: {question.text}", question.answers[0])

    def _quotation(self, passage: Passage) -> Task:
        sentence = self._rng.choice(_sentences(passage))
        cue = " ".join(sentence.split()[:_NUM_CUE_WORDS])
        asked = f'Quote the sentence that begins with "{cue}".'
        if passage.title and self._rng.random() < 0.5:
            sentence = _sentences(passage)[0]
            asked = f"Quote the first full sentence about {passage.subject}."
        return self._task([passage], asked, sentence)

    def _task(self, own: Sequence[Passage], asked: str, answer: str) -> Task:
        rng = self._rng
        count = rng.randint(min(len(own) + 1, self._max_documents), self._max_documents)
        titles = {passage.title for passage in own}
        others = [p for p in rng.sample(self._passages, count) if p.title not in titles]
        shown = [*own, *others][: max(count, len(own))]
        rng.shuffle(shown)
        spans: list[Part] = [
            Span(self._form.format(title=p.title, text=p.text).strip()) for p in shown
        ]
        system = rng.choice(_SYSTEMS)
        if self._chat:
            messages = [Message("system", system), Message("user", [*spans, Text(asked)])]
            return Task(Prompt.chat(messages), answer)
        return Task(Prompt([Text(f"{system}\n\n"), *spans, Text(f"{asked}\nAnswer:")]), answer)


def _sentences(passage: Passage) -> list[str]:
    """Sentences long enough to look for and short enough to learn from."""
    found = _SENTENCE_END.split(" ".join(passage.text.split()))
    return [s for s in found if _MIN_WORDS <= len(s.split()) <= _MAX_WORDS]


def _ask(passages: Sequence[Passage], kinds: Sequence[str]) -> list[Question]:
    """Every question of these kinds that the documents answer; none is asked of others."""
    documents, count = min(len(passages), 2), max(64, len(passages) // 4)
    made: dict[str, Question] = {}
    for kind in kinds:
        try:
            found = make_questions(passages, kinds=[kind], count=count, documents=documents)
        except ConfigurationError:  # no document states such a fact
            continue
        made |= {question.text: question for question in found}
    return list(made.values())
