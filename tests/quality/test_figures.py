"""Scores, intervals, divergences: against values known otherwise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from llama_index.core.schema import TextNode

from minipic_backend.errors import PromptError
from minipic_backend.layout.primer import own_primer
from minipic_backend.layout.ranking import BM25, rank_spans
from minipic_backend.prompt import Span
from minipic_backend.quality.divergence import agrees, divergence
from minipic_backend.quality.intervals import bootstrap, paired_ratio, wilson
from minipic_backend.quality.outcomes import Outcome, summarize
from minipic_backend.quality.scoring import contains, exact_match, f1, normalize


def test_normalization_is_squads() -> None:
    assert normalize(" The  U.S.A., an Answer! ") == "usa answer"


def test_exact_match_takes_any_right_answer() -> None:
    assert exact_match("The Rhine.", ("Danube", "rhine"))
    assert not exact_match("the river Rhine", ("Rhine",))
    assert contains("the river Rhine", ("Rhine",))
    assert not contains("Rhineland", ("Rhine",))


@pytest.mark.parametrize(
    ("answer", "right", "score"),
    [
        ("Victor Fleming", ["Victor Fleming"], 1.0),
        ("Victor Lonzo Fleming", ["Victor Fleming"], 0.8),  # precision 2/3, recall 1
        ("Fleming", ["Victor Fleming", "V. Fleming"], 2 / 3),
        ("nobody", ["Victor Fleming"], 0.0),
        ("the", ["an"], 1.0),  # both empty after normalization
    ],
)
def test_f1(answer: str, right: list[str], score: float) -> None:
    assert f1(answer, right) == pytest.approx(score)


def test_wilson_interval() -> None:
    # Newcombe (1998), table I: 81 of 263 and 15 of 148, score method without correction.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_bootstrap_has_the_width_of_the_normal_interval() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 400).tolist()
    low, high = bootstrap(values, rounds=4000)
    assert low < np.mean(values) < high
    assert high - low == pytest.approx(2 * 1.96 * 2.0 / 20, rel=0.15)
    assert all(map(math.isnan, bootstrap([])))


def test_a_paired_ratio_knows_that_the_prompts_are_the_same() -> None:
    truth = [1.0] * 60 + [0.0] * 40
    assert paired_ratio(truth, truth) == (1.0, 1.0)
    low, high = paired_ratio([1.0] * 54 + [0.0] * 46, truth)
    assert low < 0.9 < high < 1.0


def whole_kl(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * np.log(p / q)).sum())


def top(p: np.ndarray, count: int) -> dict[int, float]:
    return {int(i): float(np.log(p[i])) for i in np.argsort(-p)[:count]}


def test_divergence_of_all_tokens_is_the_whole_one_and_of_some_a_lower_bound() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        p, q = (rng.dirichlet(np.full(200, 0.05)) + 1e-9 for _ in range(2))
        p, q = p / p.sum(), q / q.sum()
        exact = whole_kl(p, q)
        assert divergence(top(p, 200), top(q, 200)) == pytest.approx(exact, rel=1e-6)
        assert 0 <= divergence(top(p, 20), top(q, 20)) <= exact + 1e-9
    assert divergence(top(p, 20), top(p, 20)) == 0


def test_a_token_that_only_one_names_counts_among_the_others() -> None:
    # p = (0.9, 0.1), q = (0.2, 0.8): merged outcomes {0}, {1} of p and the rest of q
    full, other = {0: math.log(0.9)}, {1: math.log(0.8)}
    assert divergence(full, other) == 0  # nothing shared: nothing known
    assert divergence({0: math.log(0.9), 1: math.log(0.1)}, {1: math.log(0.8)}) == pytest.approx(
        0.1 * math.log(0.1 / 0.8) + 0.9 * math.log(0.9 / 0.2)
    )


def test_agreement() -> None:
    assert agrees({5: -0.1, 6: -3.0}, {5: -0.7, 7: -0.8})
    assert not agrees({5: -0.1, 6: -3.0}, {5: -0.8, 7: -0.7})


def test_bm25_prefers_rare_words() -> None:
    texts = ["the film by Fleming", "the film by a man", "the town in the hills", "the film"]
    assert BM25(texts).ranks("Who made the film by Fleming?", texts)[0] == 0
    assert BM25(texts).ranks("Where is the town?", texts)[2] == 0
    assert sorted(BM25(texts).ranks("nothing of it", texts)) == [0, 1, 2, 3]


def test_spans_are_ranked_where_they_stand() -> None:
    spans = rank_spans(["a town", Span("the film by Fleming", id="f", rank=7)], "Whose film?")
    assert spans == [Span("a town", rank=1), Span("the film by Fleming", id="f", rank=0)]
    assert rank_spans([], "Whose film?") == []


@pytest.mark.parametrize(
    "take", [lambda texts: rank_spans(texts, "Whose film?"), own_primer], ids=["rank", "primer"]
)
def test_documents_of_a_framework_are_told_from_texts(take: Any) -> None:
    for document in (Document("A town."), TextNode(text="A town."), None, b"A town."):
        with pytest.raises(PromptError, match=r"takes texts.*page_content.*get_content.*, not "):
            take(["A text.", document])


def outcome(number: int, kind: str, exact: bool | None, kl: tuple[float, ...]) -> Outcome:
    f1_score = None if exact is None else float(exact)
    agreed = tuple(value < 0.5 for value in kl)
    return Outcome(number, kind, "", exact, exact, f1_score, kl, agreed)


def test_figures_by_kind_and_over_all() -> None:
    full = [outcome(i, "ab"[i % 2], i != 3, (0.0, 0.0)) for i in range(8)]
    some = [outcome(i, "ab"[i % 2], i > 3, (0.2, 0.6)) for i in range(8)]
    a, b, everything = summarize(some, full)
    assert (a.kind, b.kind, everything.kind) == ("a", "b", "all")
    assert (a.count, everything.count) == (4, 8)
    assert everything.exact is not None
    assert everything.exact == (0.5, *wilson(4, 8))
    assert everything.exact_ratio is not None
    assert everything.exact_ratio[0] == pytest.approx(4 / 7)
    assert (everything.kl[0], everything.first_kl) == pytest.approx((0.4, 0.2))
    assert everything.agreement == 0.5


def test_without_answers_there_is_divergence_alone() -> None:
    one = [outcome(0, "own", None, (0.25,))]
    (figures,) = summarize(one, one)
    assert figures.exact is figures.exact_ratio is figures.f1 is figures.contained is None
    assert figures.kl[0] == 0.25
