"""Teacher forcing by starting again at each difference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from minipic_backend.engines.teacher import follow
from minipic_backend.errors import EngineError
from minipic_backend.results import Completion, Result, Timing, Usage

VOCABULARY = 4


def says(prompt: int, given: Sequence[int]) -> int:
    """A model: the next token is a function of everything before it."""
    return (prompt + sum((i + 1) * t for i, t in enumerate(given))) % VOCABULARY


def entry(prompt: int, given: Sequence[int]) -> dict[int, float]:
    best = says(prompt, given)
    return {best: -0.1, (best + 1) % VOCABULARY: -3.0 - len(given)}


class Model:
    """Generates greedily, up to five tokens at once, and counts its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, tuple[int, ...]]] = []

    def __call__(self, asked: Sequence[tuple[int, Sequence[int]]]) -> list[Result]:
        return [self.run(number, tuple(given)) for number, given in asked]

    def run(self, number: int, given: tuple[int, ...]) -> Result:
        self.asked.append((number, given))
        tokens = list(given)
        logprobs = []
        for _ in range(5):
            logprobs.append(entry(number, tokens))
            tokens.append(says(number, tokens))
        said = tuple(tokens[len(given) :])
        completion = Completion(0, "", said, "length", None, tuple(logprobs))
        return Result("r", (completion,), Usage(1, 5), Timing(0.0, 0.0))


ANSWERS = [(0, 0, 0, 0), (1, 2, 3, 0, 1, 2, 3), (), (3,)]


def test_every_position_gets_its_own_distribution() -> None:
    found = follow(ANSWERS, Model())
    expected = [
        tuple(entry(number, answer[:i]) for i in range(len(answer)))
        for number, answer in enumerate(ANSWERS)
    ]
    assert found == expected


def test_requests_are_made_only_where_answers_part() -> None:
    model = Model()
    follow(ANSWERS, model)
    for number, given in model.asked:
        if given:
            assert says(number, given[:-1]) != given[-1] or len(given) % 5 == 0
    parted = sum(
        says(number, answer[:i]) != answer[i]
        for number, answer in enumerate(ANSWERS)
        for i in range(len(answer) - 1)
    )
    assert len(model.asked) <= parted + 3 + 1


def test_what_was_run_already_is_not_run_again() -> None:
    model = Model()
    begun = [model.run(number, ()) for number in range(len(ANSWERS))]
    model.asked.clear()
    assert follow(ANSWERS, model, begun=begun) == follow(ANSWERS, Model())
    assert all(given for _, given in model.asked)


def test_an_engine_without_logprobs_is_told_apart() -> None:
    def silent(asked: Sequence[tuple[int, Sequence[int]]]) -> list[Result]:
        completion = Completion(0, "", (1,))
        return [Result("r", (completion,), Usage(1, 1), Timing(0.0, 0.0)) for _ in asked]

    with pytest.raises(EngineError, match="'r' brought no log-probabilities"):
        follow([(1, 2)], silent)
