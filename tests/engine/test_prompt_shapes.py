"""Prompts of every shape: cold, warm and chunked, each held against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from check import assert_same, assert_true
from prompts import PromptMaker, join, passages

from minipic_backend.config import SpanOptions
from minipic_backend.spans.patches import Patch

NUM_TOKENS = 3


def _several_dependent_segments(make: PromptMaker) -> list[int]:
    return join(
        make.prefix(), *make.spans(2), make.text("And now something else:\n"), *make.spans(1, 2),
        make.question(),
    )  # fmt: skip


def _dependent_segments_in_a_row(make: PromptMaker) -> list[int]:
    return join(
        make.prefix(), *make.spans(2), make.text("First part.\n"), make.text("Second part.\n"),
        make.question(),
    )  # fmt: skip


def _no_prefix(make: PromptMaker) -> list[int]:
    return join(*make.spans(3), make.question())


def _dependent_segment_first(make: PromptMaker) -> list[int]:
    return join(make.text("Read this.\n"), *make.spans(2), make.question())


def _no_span(make: PromptMaker) -> list[int]:
    return join(make.prefix(), make.question())


def _same_document_twice(make: PromptMaker) -> list[int]:
    one, two = make.spans(2)
    return join(make.prefix(), one, two, one, make.question())


def _documents_that_share_their_first_block(make: PromptMaker) -> list[int]:
    head = make.encode("The same beginning, word for word, of two documents. " * 6)
    head = head[: make.block_size - 1]
    spans = [
        make.fill([make.config.ssep, *head, *make.encode(tail)], make.config.pad)
        for tail in (" It ends with apples.\n\n", " It ends with pears, and later.\n\n")
    ]
    assert spans[0][: make.block_size] == spans[1][: make.block_size]
    return join(make.prefix(), *spans, make.question())


def _document_of_whole_blocks(make: PromptMaker) -> list[int]:
    text = make.encode("Some document that fills up its blocks to the last token. " * 8)
    whole = [make.config.ssep, *text[: 2 * make.block_size - 1]]
    assert len(whole) % make.block_size == 0
    return join(make.prefix(), whole, *make.spans(1), make.question())


def _empty_and_one_token_documents(make: PromptMaker) -> list[int]:
    empty = make.fill([make.config.ssep], make.config.pad)
    one = make.fill([make.config.ssep, *make.encode("One")], make.config.pad)
    return join(make.prefix(), empty, one, *make.spans(1), make.question())


def _question_of_several_blocks(make: PromptMaker) -> list[int]:
    return join(make.prefix(), *make.spans(2), make.question("What is a generator, and why? " * 14))


def _question_of_one_marker(make: PromptMaker) -> list[int]:
    return join(make.prefix(), *make.spans(2), [make.config.pdep])


def _question_of_whole_blocks(make: PromptMaker) -> list[int]:
    question = make.question("What is a generator, and why would one use it? " * 14)
    return join(make.prefix(), *make.spans(1), question[: 2 * make.block_size])


SHAPES: dict[str, Callable[[PromptMaker], list[int]]] = {
    shape.__name__.strip("_"): shape
    for shape in (
        _several_dependent_segments,
        _dependent_segments_in_a_row,
        _no_prefix,
        _dependent_segment_first,
        _no_span,
        _same_document_twice,
        _documents_that_share_their_first_block,
        _document_of_whole_blocks,
        _empty_and_one_token_documents,
        _question_of_several_blocks,
        _question_of_one_marker,
        _question_of_whole_blocks,
    )
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("encoding", ["span_local", "unrotated"])
def test_cold_warm_and_chunked(rigs: Any, truth: Any, encoding: str, shape: str) -> None:
    """In float32; by turns in both frames, with both offset layouts, markers seen and hidden."""
    rig = rigs.get("float32", encoding)
    turn = list(SHAPES).index(shape) + (encoding == "unrotated")
    options = SpanOptions(
        ("prefix", "none")[turn // 2 % 2],
        ("compact", "padded")[turn // 4 % 2],
        see_markers=turn % 2 == 0,
    )
    make = PromptMaker(rig.engine.tokenizer, rig.config)
    prompt = SHAPES[shape](make)
    rig.reset()
    cold = rig.run(prompt, options, num_tokens=NUM_TOKENS)
    warm = rig.run(prompt, options, num_tokens=NUM_TOKENS)
    assert warm.cached_tokens == (len(prompt) - 1) // rig.config.block_size * rig.config.block_size
    rig.reset()
    with rig.chunked(45), rig.watched() as steps:
        chunked = rig.run(prompt, options, num_tokens=NUM_TOKENS, request_id="chunked")
    assert len(steps.of("chunked")) > NUM_TOKENS
    assert_true(rig, truth, cold, prompt, options)
    assert_same(rig, warm, cold)
    assert_same(rig, chunked, cold)


def test_a_patch_of_nothing_at_the_very_beginning(rig: Any, make: PromptMaker, truth: Any) -> None:
    """It sees no token at all."""
    size = rig.config.block_size
    front = join(*make.spans(2))
    prompt = [*front, *[rig.config.pad] * size, *make.question()]
    options = SpanOptions(patches=(Patch(len(front), 0, size),))
    rig.reset()
    answer = rig.run(prompt, options, num_tokens=NUM_TOKENS)
    assert_true(rig, truth, answer, prompt, options)


@pytest.mark.parametrize("num_pads", [0, 1, 9])
def test_lone_span_with_generated_tokens(
    rig: Any, make: PromptMaker, truth: Any, num_pads: int
) -> None:
    """What is generated behind a lone span does not see its pads, and continues it."""
    size = rig.config.block_size
    text = make.encode(" ".join(passages()[:6]))
    span = [rig.config.ssep, *text[: 2 * size - 1 - num_pads], *[rig.config.pad] * num_pads]
    assert len(span) == 2 * size
    rig.reset()
    answer = rig.run(span, num_tokens=4)
    assert_true(rig, truth, answer, span)
    assert_same(rig, rig.run(span, num_tokens=4), answer)


def test_lone_span_that_ends_inside_a_block(exact_rig: Any, truth: Any) -> None:
    rig = exact_rig
    make = PromptMaker(rig.engine.tokenizer, rig.config)
    span = [rig.config.ssep, *make.encode(" ".join(passages()[:6]))[: rig.config.block_size + 7]]
    rig.reset()
    for options in (SpanOptions(), SpanOptions(see_markers=False)):
        assert_true(rig, truth, rig.run(span, options, num_tokens=4), span, options)


def test_markers_hidden_and_seen_share_spans(exact_rig: Any) -> None:
    """Whether later tokens see a marker changes nothing in the span itself."""
    make = PromptMaker(exact_rig.engine.tokenizer, exact_rig.config)
    prompt = make.usual(3)
    exact_rig.reset()
    exact_rig.run(prompt, SpanOptions(see_markers=True))
    hidden = exact_rig.run(prompt, SpanOptions(see_markers=False))
    assert hidden.cached_tokens == len(prompt) - len(make.question())
