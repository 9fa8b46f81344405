"""Runs techniques over questions on one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from minipic_backend.engines.teacher import TokenLogprobs
from minipic_backend.layout.ranking import BM25
from minipic_backend.prompt import Prompt
from minipic_backend.quality.divergence import agrees, divergence
from minipic_backend.quality.outcomes import Cost, Outcome
from minipic_backend.quality.prompts import PromptForm
from minipic_backend.quality.questions import Question
from minipic_backend.quality.scoring import contains, exact_match, f1
from minipic_backend.quality.techniques import TechniqueSpec, parse_technique
from minipic_backend.results import Result

__all__ = ["QualityBench"]

_FULL = parse_technique("full")
_TOP = 20  # the most that vLLM gives by default


@dataclass(frozen=True, slots=True)
class _Truth:
    """Full attention's answer to a question, and its distributions along it."""

    token_ids: tuple[int, ...]
    along: tuple[TokenLogprobs, ...]


class QualityBench:
    """Full attention's answers to a set of questions, and what techniques make of them.

    Args:
        engine: an `Engine` (any `BaseEngine`).
        questions: the set.
        form: how they are put.
        max_tokens: of each answer.
        batch: prompts handed to the engine together.
        progress: called with the number of prompts done.
    """

    def __init__(
        self,
        engine: Any,
        questions: Sequence[Question],
        form: PromptForm,
        *,
        max_tokens: int = 16,
        batch: int = 256,
        progress: Callable[[int], Any] = lambda count: None,
    ) -> None:
        self._engine = engine
        self._questions = questions
        self._form = form
        self._greedy = {"temperature": 0.0, "logprobs": _TOP, "max_tokens": max_tokens}
        self._batch = batch
        self._progress = progress
        prompts = [form.prompt(question, _FULL, question.ranks) for question in questions]
        results = self._generate(prompts, _FULL)
        self._truth = [
            _Truth(result.token_ids, tuple(result.completions[0].logprobs or ()))
            for result in results
        ]
        self.full: list[Outcome] = self._outcomes(_FULL, prompts, results)

    def outcomes(self, spec: TechniqueSpec) -> list[Outcome]:
        """What a technique does with every question, in their order."""
        if spec == _FULL:
            return self.full
        ranks = self._ranks(spec)
        prompts = [
            self._form.prompt(question, spec, order)
            for question, order in zip(self._questions, ranks, strict=True)
        ]
        return self._outcomes(spec, prompts, self._generate(prompts, spec))

    def cost(self, spec: TechniqueSpec, sample: int) -> Cost | None:
        """Cost of a technique, on `sample` questions; None for 0.

        Another question over the same documents, in another order, comes first; then the
        question, alone on the engine.
        """
        recomputed, ttft = [], []
        for question in _spread(self._questions, sample):
            ranks = _fixed_ranks(question, spec)
            prompt = self._form.prompt(question, spec, ranks)
            recomputed.append(self._recomputed(prompt, spec, question))
            self._engine.reset_cache()
            before = self._form.other_prompt(question, ranks)
            self._engine.generate(before, **spec.options, temperature=0.0, max_tokens=1)
            result = self._engine.generate(prompt, **spec.options, temperature=0.0, max_tokens=1)
            ttft.append(result.timing.ttft_s)
        return Cost(fmean(recomputed), tuple(ttft)) if ttft else None

    def _recomputed(self, prompt: Prompt, spec: TechniqueSpec, question: Question) -> float:
        """Tokens of dependent segments beyond those of the plain question, as a share of the
        documents' tokens; 1 without spans."""
        rows = self._engine.explain(prompt, **spec.options).rows
        if all(row.kind == "prompt" for row in rows):
            return 1.0
        plain = self._form.prompt(question, _FULL, question.ranks)
        base = self._engine.explain(plain, technique="block_attention").rows
        # A system prompt behind a universal frame is read from the cache, like a prefix.
        has_text = len(rows) > 2 and (rows[0].kind, rows[1].label) == ("prefix", "text")
        extra = _tokens(rows[2:] if has_text else rows, "dependent") - _tokens(base, "dependent")
        return extra / max(1, _tokens(base, "span"))

    def _ranks(self, spec: TechniqueSpec) -> list[tuple[int, ...]]:
        if spec.prompt.get("rank") == "answer":
            return self._ranks_by_first_answer(spec)
        return [_fixed_ranks(question, spec) for question in self._questions]

    def _ranks_by_first_answer(self, spec: TechniqueSpec) -> list[tuple[int, ...]]:
        """Two steps: answer with every document a span, then rank documents by that answer."""
        first = TechniqueSpec(spec.label, {**spec.options, "late": 0}, spec.prompt)
        prompts = [self._form.prompt(q, first, q.ranks) for q in self._questions]
        ranks = []
        results = self._generate(prompts, first)
        for question, result in zip(self._questions, results, strict=True):
            texts = [self._form.show(passage) for passage in question.documents]
            ranks.append(tuple(BM25(texts).ranks(result.text, texts)))
        return ranks

    def _outcomes(
        self, spec: TechniqueSpec, prompts: Sequence[Prompt], results: Sequence[Result]
    ) -> list[Outcome]:
        answers = [truth.token_ids for truth in self._truth]
        along = self._engine.score(prompts, answers, top=_TOP, begun=results, **spec.options)
        return [
            _outcome(number, question, result, truth, given)
            for number, (question, result, truth, given) in enumerate(
                zip(self._questions, results, self._truth, along, strict=True)
            )
        ]

    def _generate(self, prompts: Sequence[Prompt], spec: TechniqueSpec) -> list[Result]:
        results: list[Result] = []
        for start in range(0, len(prompts), self._batch):
            part = list(prompts[start : start + self._batch])
            results += self._engine.generate(part, **spec.options, **self._greedy)
            self._progress(len(part))
        return results


def _outcome(
    number: int,
    question: Question,
    result: Result,
    truth: _Truth,
    along: Sequence[TokenLogprobs],
) -> Outcome:
    text, right = result.text.strip(), question.answers
    return Outcome(
        number=number,
        kind=question.kind,
        text=text,
        exact=exact_match(text, right) if right else None,
        contained=contains(text, right) if right else None,
        f1=f1(text, right) if right else None,
        divergences=tuple(divergence(p, q) for p, q in zip(truth.along, along, strict=True)),
        agreements=tuple(agrees(p, q) for p, q in zip(truth.along, along, strict=True)),
    )


def _fixed_ranks(question: Question, spec: TechniqueSpec) -> tuple[int, ...]:
    chosen = spec.prompt.get("rank", "given")
    if chosen == "oracle":
        return question.oracle_ranks
    if chosen == "wrong":
        return tuple(len(question.documents) - 1 - rank for rank in question.oracle_ranks)
    return question.ranks


def _spread(questions: Sequence[Question], count: int) -> list[Question]:
    step = max(1, len(questions) // max(1, count))
    return list(questions[::step])[:count]


def _tokens(rows: Sequence[Any], kind: str) -> int:
    return sum(row.num_tokens - row.num_pads for row in rows if row.kind == kind)
