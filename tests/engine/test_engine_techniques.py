"""Techniques that compute parts of spans anew: each is its own float64 reference, cold, warm, in
chunks, partly evicted, and beside the others."""

from __future__ import annotations

from typing import Any

import pytest
from check import assert_same, assert_true
from prompts import passages

from minipic_backend import ContextWindowError, Message, Prompt, Span, Text
from minipic_backend.config import SpanOptions, resolve_technique
from minipic_backend.prompt_cache import Module, Parameter, Schema, Union

NUM_TOKENS = 3
TECHNIQUES: dict[str, dict[str, Any]] = {
    "epic-1": {"technique": "epic"},
    "epic-2-framed": {"technique": "epic", "blocks": 2, "frame": "prefix"},
    "epic-paper": {"technique": "epic_paper"},
    "selective": {"technique": "selective", "budget": 0.3},
    "prompt_cache": {"technique": "prompt_cache"},
}
OPTIONS = {
    "compact": {},
    "padded": {"offsets": "padded"},
    "hidden markers": {"see_markers": False},
}


def prompt(first: int = 0, count: int = 4) -> Prompt:
    spans = [Span(text) for text in passages()[first : first + count]]
    return Prompt.chat(
        [
            Message("system", "Answer from the documents."),
            Message("user", [*spans[:2], Text("Read on.\n"), *spans[2:], Text("What is a list?")]),
        ]
    )


def schema_prompt() -> Prompt:
    """Modules with gaps between them, one of a union, an argument inside a module."""
    texts = passages()
    schema = Schema(
        "docs",
        [
            "Read this first. ",
            Module("one", [texts[0], Parameter("name", 24), texts[1]]),
            Union([Module("short", texts[2]), Module("long", texts[3] + texts[4])]),
            Module("left out", texts[5]),
            Module("last", [texts[6], Parameter("more", 4, default="so on")]),
        ],
        system="Answer from the documents.",
        scaffolds=[["one", "long"]],
    )
    arguments = {"one": {"name": "generators, and how they are used"}, "short": {}, "last": {}}
    return schema.prompt("What is a list?", arguments)


def laid_out(rig: Any, name: str, options: str = "compact", **which: int) -> Any:
    """Token ids, and options with the patches that the layout chose."""
    settings = resolve_technique(**TECHNIQUES[name])
    chosen = SpanOptions(settings.frame, **OPTIONS[options])
    asked = schema_prompt() if settings.schema else prompt(**which)
    made = rig.engine.layout.lay_out(asked, settings, options=chosen)
    return list(made.token_ids), made.table.options


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, "compact") for name in TECHNIQUES]
    + [(name, options) for name in ("epic-1", "prompt_cache") for options in list(OPTIONS)[1:]],
)
def test_cold_warm_and_chunked(float32_rig: Any, truth: Any, name: str, options: str) -> None:
    rig = float32_rig
    ids, chosen = laid_out(rig, name, options)
    rig.reset()
    cold = rig.run(ids, chosen, num_tokens=NUM_TOKENS)
    assert cold.cached_tokens == 0
    assert_true(rig, truth, cold, ids, chosen)
    warm = rig.run(ids, chosen, num_tokens=NUM_TOKENS)
    assert warm.cached_tokens == (len(ids) - 1) // rig.config.block_size * rig.config.block_size
    assert_same(rig, warm, cold)
    if options == "compact":
        rig.reset()
        with rig.chunked(50):
            chunked = rig.run(ids, chosen, num_tokens=NUM_TOKENS)
        assert_same(rig, chunked, cold)


@pytest.mark.parametrize("name", ["epic-1", "selective"])
def test_partly_evicted(exact_rig: Any, name: str) -> None:
    rig = exact_rig
    ids, chosen = laid_out(rig, name)
    rig.reset()
    cold = rig.run(ids, chosen, num_tokens=NUM_TOKENS)
    blocks = rig.cached_blocks(ids, chosen)
    patch = chosen.patches[-1].at // rig.config.block_size
    rig.evict([blocks[3], blocks[patch]])
    assert_same(rig, rig.run(ids, chosen, num_tokens=NUM_TOKENS), cold)


def test_documents_in_another_order_are_hits(exact_rig: Any, truth: Any) -> None:
    """EPIC reuses every span that the plain technique left; only the heads are its own."""
    rig = exact_rig
    rig.reset()
    plain = resolve_technique("block_attention")
    options = SpanOptions("none")
    made = rig.engine.layout.lay_out(prompt(), plain, options=options)
    rig.run(list(made.token_ids), options)
    ids, chosen = laid_out(rig, "epic-1")
    answer = rig.run(ids, chosen, num_tokens=NUM_TOKENS)
    assert answer.cached_tokens == chosen.patches[0].at
    assert_true(rig, truth, answer, ids, chosen)


def test_all_techniques_in_one_batch(float32_rig: Any) -> None:
    """Through the engine's own door: `technique` is a choice of each request."""
    engine = float32_rig.engine
    chosen: list[dict[str, Any]] = [
        *(each for name, each in TECHNIQUES.items() if name != "prompt_cache"),
        *({"technique": name} for name in ("primed", "block_attention", "full")),
    ]
    greedy = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
    float32_rig.reset()
    with float32_rig.paused():
        jobs = [engine._submit(engine._prepare(prompt(), {**greedy, **each})) for each in chosen]
    together = [engine._finish(*job) for job in jobs]
    for each, answer in zip(chosen, together, strict=True):
        float32_rig.reset()
        assert engine.generate(prompt(), **greedy, **each).token_ids == answer.token_ids


def test_explain_shows_what_is_computed_anew(exact_rig: Any) -> None:
    shown = exact_rig.engine.explain(prompt(), technique="epic")
    labels = [row.label for row in shown.rows]
    assert labels == [
        *("prefix", "doc 1", "doc 2", "doc 1 again", "doc 2 again", "text"),
        *("doc 3", "doc 4", "doc 3 again", "doc 4 again", "question"),
    ]


def test_modules_are_hits_whatever_is_imported_with_them(exact_rig: Any) -> None:
    """And an answer ends where the model's positions do, though its prompt has few tokens."""
    engine = exact_rig.engine
    limit = engine.max_model_len
    modules = [Module("a", passages()[0]), Module("b", passages()[1])]
    gap = Module("gap", ["x", Parameter("y", limit - 300)])
    schema = Schema("s", [modules[0], gap, modules[1]])
    exact_rig.reset()
    options: dict[str, Any] = {"technique": "prompt_cache", "temperature": 0.0, "ignore_eos": True}
    engine.generate(schema.prompt("Why?", ["b"]), max_tokens=1, **options)
    both = engine.generate(schema.prompt("Why?", ["a", "b"]), max_tokens=1000, **options)
    assert both.usage.cached_tokens > 0
    end = engine._prepare(schema.prompt("Why?", ["a", "b"]), {**options}).laid_out.num_positions
    assert limit - 300 < end < limit
    assert both.usage.completion_tokens == limit - end < 1000
    long = Schema("s", [Module("gap", ["x", Parameter("y", limit)]), modules[1]])
    with pytest.raises(ContextWindowError):
        engine.generate(long.prompt("Why?", ["b"]), **options)
