"""Kinds of questions, each made by rule from facts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minipic_backend.quality.facts import Fact
from minipic_backend.quality.passages import Passage

__all__ = ["KINDS", "Asked"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, its right answers, the passages that hold them, and the kind of fact it is."""

    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]
    relation: str


Maker = Callable[[Sequence[Fact], random.Random], list[Asked]]


def _years(facts: Sequence[Fact], rng: random.Random) -> list[Asked]:
    return [
        Asked(
            f"In which year was {fact.passage.subject} born?",
            fact.values,
            (fact.passage,),
            fact.relation,
        )
        for fact in _shuffled(facts, rng, "born")
    ]


def _deaths(facts: Sequence[Fact], rng: random.Random) -> list[Asked]:
    return [
        Asked(
            f"In which year did {fact.passage.subject} die?",
            fact.values,
            (fact.passage,),
            fact.relation,
        )
        for fact in _shuffled(facts, rng, "died")
    ]


def _names(facts: Sequence[Fact], rng: random.Random) -> list[Asked]:
    return [
        Asked(f"Who directed {fact.passage.subject}?", *_source(fact))
        for fact in _shuffled(facts, rng, "director")
    ]


def _places(facts: Sequence[Fact], rng: random.Random) -> list[Asked]:
    forms = {
        "birthplace": "In which place was {} born?",
        "location": "In which place is {}?",
    }
    return [
        Asked(
            forms[fact.relation].format(fact.passage.subject),
            fact.values,
            (fact.passage,),
            fact.relation,
        )
        for fact in _shuffled(facts, rng, *forms)
    ]


def _yes_no(facts: Sequence[Fact], rng: random.Random) -> list[Asked]:
    """Half of them true."""
    forms = {"born": "Was {} born in {}?", "director": "Was {} directed by {}?"}
    by_relation = {relation: _shuffled(facts, rng, relation) for relation in forms}
    asked = []
    for relation, found in by_relation.items():
        values = sorted({fact.values[0] for fact in found})
        for number, fact in enumerate(found):
            value, answer = fact.values[0], "yes"
            if number % 2:
                value, answer = _false_value(fact, values, rng), "no"
            question = forms[relation].format(fact.passage.subject, value)
            asked.append(Asked(question, (answer,), (fact.passage,), relation))
    rng.shuffle(asked)
    return asked


def _false_value(fact: Fact, values: Sequence[str], rng: random.Random) -> str:
    """A year nearby, or another film's director."""
    if fact.relation == "born":
        return str(fact.year + rng.choice([-1, 1]) * rng.randint(2, 15))
    return rng.choice([value for value in values if value not in fact.values] or ["Nobody"])


def _comparisons(facts: Sequence[Fact], rng: random.Random) -> list[Asked]:
    """Two passages, at least two years apart."""
    forms = {
        "born": "Who was born first, {} or {}?",
        "released": "Which film was released first, {} or {}?",
    }
    asked = []
    for relation, form in forms.items():
        found = _shuffled(facts, rng, relation)
        for a, b in zip(found[::2], found[1::2], strict=False):
            if abs(a.year - b.year) < 2:
                continue
            first = min(a, b, key=lambda fact: fact.year).passage
            question = form.format(a.passage.subject, b.passage.subject)
            answers = tuple(dict.fromkeys((first.subject, first.title)))
            asked.append(Asked(question, answers, (a.passage, b.passage), relation))
    rng.shuffle(asked)
    return asked


def _source(fact: Fact) -> tuple[tuple[str, ...], tuple[Passage, ...], str]:
    return fact.values, (fact.passage,), fact.relation


def _shuffled(facts: Sequence[Fact], rng: random.Random, *relations: str) -> list[Fact]:
    found = [fact for fact in facts if fact.relation in relations]
    rng.shuffle(found)
    return found


KINDS: dict[str, Maker] = {
    "year": _years,
    "death": _deaths,
    "name": _names,
    "place": _places,
    "yes_no": _yes_no,
    "comparison": _comparisons,
}
"""A year of birth or death, a name, a place, yes or no, a comparison over two documents."""
