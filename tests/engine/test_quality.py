"""Scores, comparisons and the benchmark on a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prompts import passages

from minipic_backend import Engine, Message, Prompt, Span, Text
from minipic_backend.quality.bench import QualityBench
from minipic_backend.quality.invented import invented_passages
from minipic_backend.quality.outcomes import summarize
from minipic_backend.quality.prompts import PromptForm
from minipic_backend.quality.questions import make_questions
from minipic_backend.quality.techniques import parse_technique


@pytest.fixture
def engine(exact_rig: Any) -> Iterator[Engine]:
    exact_rig.reset()
    yield exact_rig.engine
    exact_rig.assert_idle()


def ask(question: str = "What is this about?") -> Prompt:
    spans = [Span(text, rank=rank) for rank, text in enumerate(passages()[:3])]
    return Prompt.chat([Message("user", [*spans, Text(question)])])


@pytest.mark.parametrize("technique", ["primed", "block_attention", "full"])
def test_scores_are_the_references(engine: Engine, truth: Any, technique: str) -> None:
    """An answer that the model would never give, so that it is started again at each token."""
    answer = [500, 900, 42]
    (along,) = engine.score([ask()], [answer], top=50, technique=technique)
    laid_out = engine._prepare(ask(), {"technique": technique}).laid_out
    expected = truth.logprobs(laid_out.token_ids, laid_out.table, answer[:-1])
    for entry, row in zip(along, expected, strict=True):
        best = torch.topk(row, 20).indices.tolist()
        assert set(best) <= set(entry)
        assert max(abs(entry[token] - float(row[token])) for token in best) < 1e-3


def test_compare_tells_answers_and_divergence(engine: Engine) -> None:
    comparison = engine.compare(ask(), ["full", "primed", "block_attention"], max_tokens=8)
    full, primed, block = comparison.answers
    assert full.same_text
    assert (full.divergence, full.agreement) == (pytest.approx(0, abs=1e-6), 1.0)
    assert primed.divergence > 0
    assert block.divergence > 0
    assert block.worst_divergence >= block.divergence
    assert primed.num_prompt_tokens > block.num_prompt_tokens > full.num_prompt_tokens
    lines = str(comparison).splitlines()
    assert [line.split()[0] for line in lines] == [
        "technique", "full", "primed", "block_attention",
    ]  # fmt: skip


def test_the_benchmark_on_an_engine(engine: Engine) -> None:
    questions = make_questions(
        invented_passages(40), kinds=["year", "comparison"], count=1, documents=3
    )
    bench = QualityBench(engine, questions, PromptForm(), max_tokens=4)
    (*_, full) = summarize(bench.full, bench.full)
    assert full.kl[0] == pytest.approx(0, abs=1e-6)
    assert full.agreement == 1.0
    spans = parse_technique("block_attention")
    (*_, figures) = summarize(bench.outcomes(spans), bench.full)
    assert figures.kl[0] > 0.01
    recomputed = {
        text: bench.cost(parse_technique(text), 1).recomputed  # type: ignore[union-attr]
        for text in (
            *("full", "primed:late=0", "primed:late=1", "primed:late=0,digest=titles"),
            "primed:late=0,frame=universal",
        )
    }
    assert recomputed["full"] == 1.0
    assert recomputed["primed:late=0"] == recomputed["primed:late=0,frame=universal"] == 0.0
    assert 0.2 < recomputed["primed:late=1"] < 0.5  # one of three documents
    assert 0 < recomputed["primed:late=0,digest=titles"] < recomputed["primed:late=1"]


def test_two_steps_rank_by_the_first_answer(engine: Engine) -> None:
    questions = make_questions(invented_passages(40), kinds=["year"], count=2, documents=3)
    bench = QualityBench(engine, questions, PromptForm(), max_tokens=4)
    outcomes = bench.outcomes(parse_technique("primed:late=1,rank=answer"))
    assert [outcome.number for outcome in outcomes] == [0, 1]


def test_the_command(tmp_path: Path, tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    from minipic_backend.cli import main

    out, plot = tmp_path / "q.json", tmp_path / "q.png"
    arguments = ["bench", "quality", "--model", tiny_model, "--kinds", "year,name", "--count", "1"]
    arguments += ["--documents", "2,3", "--max-tokens", "3", "--cost-sample", "1"]
    arguments += ["--techniques", "primed:late=0", "--max-model-len", "1024"]
    assert main([*arguments, "--json", str(out), "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("primed:late=0") == shown.count("full  ") == 2
    content = json.loads(out.read_text())
    found = [(one["technique"], one["documents"]) for one in content["techniques"]]
    assert found == [("full", 2), ("primed:late=0", 2), ("full", 3), ("primed:late=0", 3)]
    assert all(len(one["answers"]) == 2 and one["cost"] for one in content["techniques"])
    assert plot.read_bytes().startswith(b"\x89PNG")
