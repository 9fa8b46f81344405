"""Question sets: made by rule from passages, or the user's own."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minipic_backend.errors import ConfigurationError, shown
from minipic_backend.layout.ranking import BM25
from minipic_backend.quality.facts import find_facts
from minipic_backend.quality.kinds import KINDS, Asked
from minipic_backend.quality.passages import Passage, read_jsonl

__all__ = ["Question", "make_questions", "read_questions"]


@dataclass(frozen=True, slots=True)
class Question:
    """A question over documents.

    Args:
        kind: its group in the report.
        text: the question.
        answers: right answers, any of them; empty where none is known.
        documents: in the order of the prompt.
        ranks: of each document, by BM25 or the user's own retriever: 0 the best.
        relevant: indices of the documents that hold the answer; empty where nobody knows.
    """

    kind: str
    text: str
    answers: tuple[str, ...]
    documents: tuple[Passage, ...]
    ranks: tuple[int, ...]
    relevant: tuple[int, ...] = ()

    @property
    def oracle_ranks(self) -> tuple[int, ...]:
        """Ranks of a retriever that knows: the relevant documents first, then as `ranks`."""
        order = sorted(
            range(len(self.ranks)), key=lambda i: (i not in self.relevant, self.ranks[i])
        )
        places = {index: place for place, index in enumerate(order)}
        return tuple(places[index] for index in range(len(order)))


def make_questions(
    passages: Sequence[Passage],
    *,
    kinds: Iterable[str],
    count: int,
    documents: int,
    alike: bool = False,
    seed: int = 0,
) -> list[Question]:
    """`count` questions of each kind, each over `documents` passages in random order.

    A question's own passages are among them. Where there are fewer facts than questions, facts
    come again with other passages around them.

    Args:
        passages: with titles and texts.
        kinds: of `KINDS`.
        count: questions of each kind.
        documents: passages for each question.
        alike: draw the other passages from those that state the same kind of fact (as a good
            retriever would bring), not from all.
        seed: of every choice.

    Raises:
        ConfigurationError: an unknown kind, too few passages, or none of which a rule can ask.
    """
    if documents > len(passages):
        raise ConfigurationError(
            f"{documents} documents a prompt, but {len(passages)} passages: ask for fewer by "
            "--documents, or bring more"
        )
    facts = find_facts(passages)
    bm25 = BM25(passage.whole for passage in passages)
    questions = []
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigurationError(f"No kind {shown(kind)}; known: {', '.join(KINDS)}")
        rng = random.Random(f"{seed} {kind}")
        asked = KINDS[kind](facts, rng)
        if not asked:
            raise ConfigurationError(
                f"No question of the kind {shown(kind)} can be made from these passages: "
                "leave it out of --kinds"
            )
        for number in range(count):
            one = asked[number % len(asked)]
            pool = passages
            if alike:
                pool = [fact.passage for fact in facts if fact.relation == one.relation]
                pool = pool if len(pool) > documents else passages
            questions.append(_question(kind, one, pool, documents, bm25, rng))
    return questions


def read_questions(path: Path) -> list[Question]:
    """Questions of a JSONL file: `question`, `documents` (texts, or objects with `title` and
    `text`, the best first), and where known `answers`, `kind`, `relevant` (indices).

    Raises:
        ConfigurationError: no such file, or a line that is no question.
    """
    return [_read(row, f"{path}, line {number}") for number, row in enumerate(read_jsonl(path), 1)]


def _question(
    kind: str,
    asked: Asked,
    pool: Sequence[Passage],
    documents: int,
    bm25: BM25,
    rng: random.Random,
) -> Question:
    own = {passage.title for passage in asked.passages}
    others = [
        passage
        for passage in rng.sample(pool, min(len(pool), documents + len(own)))
        if passage.title not in own
    ]
    shown = [*asked.passages, *others][:documents]
    rng.shuffle(shown)
    ranks = bm25.ranks(asked.question, [one.whole for one in shown])
    relevant = tuple(i for i, passage in enumerate(shown) if passage.title in own)
    return Question(kind, asked.question, asked.answers, tuple(shown), tuple(ranks), relevant)


def _read(row: dict[str, Any], place: str) -> Question:
    try:
        text, documents = str(row["question"]), list(row["documents"])
    except (KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{place}: a question has `question` and `documents`, a list: {error}"
        ) from error
    shown = tuple(_document(one, place) for one in documents)
    answers = row.get("answers", ())
    answers = (answers,) if isinstance(answers, str) else answers
    return Question(
        kind=str(row.get("kind", "own")),
        text=text,
        answers=tuple(str(answer) for answer in answers),
        documents=shown,
        ranks=tuple(range(len(shown))),
        relevant=tuple(int(index) for index in row.get("relevant", ())),
    )


def _document(value: Any, place: str) -> Passage:
    if isinstance(value, str):
        return Passage("", value)
    if isinstance(value, dict) and "text" in value:
        return Passage(str(value.get("title", "")), str(value["text"]))
    raise ConfigurationError(f"{place}: a document is a text, or an object with `text`")
