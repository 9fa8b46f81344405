"""Frame "universal" on an engine: documents are read from the cache behind any system prompt."""

from __future__ import annotations

from typing import Any

import pytest
from check import assert_same, assert_true
from prompts import passages

from minipic_backend import Message, Prompt, Span, Text
from minipic_backend.config import resolve_technique

NUM_TOKENS = 3
DOCUMENTS = passages()[:4]
UNIVERSAL = resolve_technique("primed", late=0, frame="universal")


def prompt(system: str, order: tuple[int, ...] = (0, 1, 2, 3)) -> Prompt:
    spans = [Span(DOCUMENTS[index]) for index in order]
    return Prompt.chat([Message("system", system), Message("user", [*spans, Text("Why?")])])


def laid_out(rig: Any, asked: Prompt) -> Any:
    made = rig.engine.layout.lay_out(asked, UNIVERSAL)
    return made, list(made.token_ids), made.table.options


def test_another_system_prompt_reads_every_document(float32_rig: Any, truth: Any) -> None:
    rig = float32_rig
    _, ids, options = laid_out(rig, prompt("Answer from the documents."))
    second, other, _ = laid_out(rig, prompt("You are Ada. Be brief, and quote.", (2, 0, 3, 1)))
    rig.reset()
    cold = rig.run(ids, options, num_tokens=NUM_TOKENS)
    assert cold.cached_tokens == 0
    assert_true(rig, truth, cold, ids, options)

    answer = rig.run(other, options, num_tokens=NUM_TOKENS)
    system, spans = second.table.segments[1], second.table.segments[2:-1]
    frame = len(second.prefix_token_ids)
    assert answer.cached_tokens == frame + sum(span.num_tokens for span in spans)
    assert_true(rig, truth, answer, other, options)

    warm = rig.run(other, options, num_tokens=NUM_TOKENS)
    assert warm.cached_tokens == answer.cached_tokens + system.num_tokens
    assert_same(rig, warm, answer)
    rig.reset()
    assert_same(rig, rig.run(other, options, num_tokens=NUM_TOKENS), answer)
    rig.reset()
    with rig.chunked(50):
        assert_same(rig, rig.run(other, options, num_tokens=NUM_TOKENS), answer)


def test_at_the_engine_s_own_door(exact_rig: Any) -> None:
    """Warmed without a prompt, read by any system prompt; the first one's tokens are computed."""
    rig = exact_rig
    engine, chosen = rig.engine, {"frame": "universal", "late": 0}
    greedy = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    rig.reset()
    report = engine.warm(DOCUMENTS, **chosen)
    assert report.num_computed_tokens > 0
    for system in ("Answer from the documents.", "You are Ada. Be brief, and quote."):
        rows = engine.explain(prompt(system), **chosen).rows
        cached = [row.cached_tokens == row.num_tokens for row in rows]
        assert cached == [True, False, *[True] * 4, False]
        usage = engine.generate(prompt(system), **chosen, **greedy).usage
        assert usage.span_tokens_hit == sum(row.num_tokens for row in rows[2:-1])
        assert usage.span_tokens_computed == usage.span_tokens_waited == 0
    assert engine.warm(DOCUMENTS, prompt=prompt("A third."), **chosen).num_computed_tokens < 20


@pytest.mark.parametrize("late", [1, 2])
def test_late_documents_behind_a_system_prompt_are_the_reference(
    exact_rig: Any, truth: Any, late: int
) -> None:
    rig = exact_rig
    spans = [Span(text, rank) for rank, text in enumerate(DOCUMENTS)]
    asked = Prompt.chat([Message("system", "Be brief."), Message("user", [*spans, "Why?"])])
    made = rig.engine.layout.lay_out(
        asked, resolve_technique("primed", late=late, frame="universal")
    )
    ids, options = list(made.token_ids), made.table.options
    rig.run(ids, options)
    answer = rig.run(ids, options, num_tokens=NUM_TOKENS)
    assert answer.cached_tokens >= made.table.last.start
    assert_true(rig, truth, answer, ids, options)
