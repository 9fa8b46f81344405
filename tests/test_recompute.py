"""Which blocks are computed anew."""

from __future__ import annotations

import pytest

from minipic_backend.layout.recompute import asked_for_blocks, first_blocks

DOCUMENTS = [
    ["Arlen is a town.", "Its market is held on Mondays.", "A bridge crosses the Mose."],
    ["Berrow is a town.", "It has two mills.", "Its market is held on Fridays."],
    ["Calder is a town."],
]


def test_first_blocks() -> None:
    assert [first_blocks(count, 2) for count in (1, 2, 3)] == [[(0, 1)], [(0, 2)], [(0, 2)]]
    assert first_blocks(3, 0) == []


def test_the_words_of_the_question_choose() -> None:
    assert asked_for_blocks(DOCUMENTS, "Does Berrow have mills?", 0.3) == [[], [(0, 2)], []]
    # The market's day stands beside the name, not in its block.
    assert asked_for_blocks(DOCUMENTS, "When is the market of Berrow?", 0.3) == [
        [],
        [(0, 1), (2, 3)],
        [],
    ]


@pytest.mark.parametrize(("budget", "count"), [(0.01, 1), (0.15, 1), (0.3, 2), (1.0, 7)])
def test_budget(budget: float, count: int) -> None:
    chosen = asked_for_blocks(DOCUMENTS, "What about Calder?", budget)
    assert sum(last - first for ranges in chosen for first, last in ranges) == count
    assert chosen[2] == [(0, 1)]


def test_without_a_common_word_the_beginnings_are_taken() -> None:
    assert asked_for_blocks(DOCUMENTS, "xyz?", 0.45) == [[(0, 1)], [(0, 1)], [(0, 1)]]


def test_no_documents() -> None:
    assert asked_for_blocks([], "a", 0.1) == []


def test_words_are_compared_whatever_their_case() -> None:
    assert asked_for_blocks([["eine Allee", "eine Straße"]], "Welche STRASSE?", 0.5) == [[(1, 2)]]
