"""What the demo prints: a paragraph for each question, then one line for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median

from minipic_backend.demo.measure import Answer, Measurement
from minipic_backend.demo.questions import Question

__all__ = ["result_line", "show_measurement", "show_summary"]


def show_measurement(number: int, question: Question, measured: Measurement) -> str:
    """Answer, tokens and times of one question."""
    cold, warm, spans = measured.cold, measured.warm, measured.warm_all_spans
    lines = [f"{number}. {question.text}", f"   {warm.text}"]
    if not question.is_answered_by(warm.text):
        lines.append(f"   (expected: {question.answer})")
    if spans.text != warm.text:
        lines.append(f"   With all spans: {spans.text}")
    lines += [
        _row("cold", cold, cold),
        _row("warm", warm, cold),
        _row("warm, all spans", spans, cold),
    ]
    return "\n".join(lines) + "\n"


def _row(label: str, answer: Answer, cold: Answer) -> str:
    gain = f"{cold.ttft_s / answer.ttft_s:6.1f} x" if answer is not cold else ""
    return (
        f"   {label:<16} {answer.prompt_tokens:5d} prompt tokens, {answer.cached_tokens:5d} from "
        f"cache, first token after {answer.ttft_s:6.3f} s {gain}"
    ).rstrip()


def show_summary(questions: Sequence[Question], measured: Sequence[Measurement]) -> str:
    """Medians and right answers, in words."""
    cold, warm, spans = _medians(measured)
    right = {
        name: sum(
            question.is_answered_by(getattr(one, name).text)
            for question, one in zip(questions, measured, strict=True)
        )
        for name in ("warm", "warm_all_spans")
    }
    return (
        f"Median time to first token: {cold:.3f} s cold; {warm:.3f} s warm, {cold / warm:.1f} "
        f"times faster; {spans:.3f} s with all documents as spans, {cold / spans:.1f} times "
        f"faster.\nAnswers with the expected word: {right['warm']} of {len(measured)}; "
        f"{right['warm_all_spans']} with all documents as spans."
    )


def result_line(measured: Sequence[Measurement]) -> str:
    """Medians of seconds; tokens summed over the warm prompts at the default settings."""
    cold, warm, spans = _medians(measured)
    values = {
        "questions": len(measured),
        "cold_ttft_s": round(cold, 4),
        "warm_ttft_s": round(warm, 4),
        "warm_all_spans_ttft_s": round(spans, 4),
        "cached_tokens": sum(one.warm.cached_tokens for one in measured),
        "prompt_tokens": sum(one.warm.prompt_tokens for one in measured),
    }
    return "DEMO " + json.dumps(values, separators=(",", ":"))


def _medians(measured: Sequence[Measurement]) -> tuple[float, float, float]:
    return (
        median(one.cold.ttft_s for one in measured),
        median(one.warm.ttft_s for one in measured),
        median(one.warm_all_spans.ttft_s for one in measured),
    )
