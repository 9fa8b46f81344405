"""Spans are found in the cache wherever they stand, and are what they should be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from check import CONTENT, assert_same, assert_true
from prompts import PromptMaker, join

from minipic_backend.config import SpanOptions
from minipic_backend.engines.driver import EngineDriver


def test_permuted_documents_are_all_hit(float32_rig: Any, truth: Any, options: SpanOptions) -> None:
    rig = float32_rig
    make = PromptMaker(rig.engine.tokenizer, rig.config)
    prefix, question, spans = make.prefix(), make.question(), make.spans(4)
    rig.reset()
    rig.run(join(prefix, *spans, question), options)
    for order in ((3, 2, 1, 0), (1, 3, 0, 2), (2,), (3, 1, 1)):
        prompt = join(prefix, *(spans[i] for i in order), question)
        answer = rig.run(prompt, options)
        assert answer.cached_tokens == len(prompt) - len(question)
    assert_true(rig, truth, answer, prompt, options)


def test_documents_are_hit_behind_another_system_prompt(
    rig: Any, make: PromptMaker, truth: Any
) -> None:
    """Frame "none". The other system prompt is known already, with other documents."""
    options = SpanOptions("none")
    other = make.prefix("You are a careful assistant. Quote the documents, and be brief about it.")
    question, spans = make.question(), make.spans(3)
    rig.reset()
    rig.run(join(make.prefix(), *spans, question), options)
    rig.run(join(other, *make.spans(1, first=9), question), options)
    prompt = join(other, *reversed(spans), question)
    answer = rig.run(prompt, options)
    assert answer.cached_tokens == len(prompt) - len(question)
    assert_true(rig, truth, answer, prompt, options)


def test_documents_are_not_hit_behind_another_system_prompt_that_is_their_frame(
    exact_rig: Any,
) -> None:
    rig = exact_rig
    make = PromptMaker(rig.engine.tokenizer, rig.config)
    options = SpanOptions("prefix")
    other, question, spans = make.prefix("Be brief."), make.question(), make.spans(2)
    rig.reset()
    rig.run(join(make.prefix(), *spans, question), options)
    rig.run(join(other, *make.spans(1, first=9), question), options)
    answer = rig.run(join(other, *spans, question), options)
    assert answer.cached_tokens == len(other)


def test_a_question_hits_nothing_behind_other_documents(
    exact_rig: Any,
) -> None:
    rig = exact_rig
    make = PromptMaker(rig.engine.tokenizer, rig.config)
    one, two = make.spans(2)
    long = make.question("What do the documents say about Python? " * 8)
    rig.reset()
    rig.run(join(make.prefix(), one, two, long))
    prompt = join(make.prefix(), two, one, long)
    assert rig.run(prompt).cached_tokens == len(prompt) - len(long)
    same = rig.run(prompt).cached_tokens
    assert same == (len(prompt) - 1) // rig.config.block_size * rig.config.block_size


def test_one_batch_serves_a_document_at_two_offsets_from_the_same_blocks(
    float32_rig: Any, truth: Any, options: SpanOptions
) -> None:
    rig = float32_rig
    make = PromptMaker(rig.engine.tokenizer, rig.config)
    size = rig.config.block_size
    prefix, question = make.prefix(), make.question()
    shared, *others = make.spans(4)
    rig.reset()
    rig.run(join(prefix, shared, *others, question), options)
    first = join(prefix, shared, question)
    third = join(prefix, *others[:2], shared, others[2], question)
    with rig.watched() as steps:
        with rig.paused():
            handles = [
                rig.submit(first, options, num_tokens=2, request_id="first"),
                rig.submit(third, options, num_tokens=2, request_id="third"),
            ]
        answers = [rig.read(handle) for handle in handles]
    assert all(set(step) == {"first", "third"} for step in steps.steps)
    num_blocks = len(shared) // size
    at_first, at_third = len(prefix) // size, len(join(prefix, *others[:2])) // size
    assert at_first != at_third
    blocks = steps.of("first")[0].block_ids[at_first : at_first + num_blocks]
    assert blocks == steps.of("third")[0].block_ids[at_third : at_third + num_blocks]
    for prompt, answer in zip((first, third), answers, strict=True):
        assert_true(rig, truth, answer, prompt, options)


def test_hashes_of_a_framed_span_are_those_of_an_ordinary_prompt(
    rig: Any, make: PromptMaker
) -> None:
    """`prefix + span`, hashed by vLLM's own hasher."""
    size = rig.config.block_size
    prefix, spans = make.prefix(), make.spans(3)
    hashes = rig.block_hashes(join(prefix, *spans, make.question()), SpanOptions("prefix"))
    at = len(prefix) // size
    for span in spans:
        num_blocks = len(span) // size
        stock = rig.stock_hashes(prefix + span)
        assert hashes[: len(prefix) // size] == stock[: len(prefix) // size]
        assert hashes[at : at + num_blocks] == stock[len(prefix) // size :]
        at += num_blocks


@pytest.fixture(scope="module")
def stock(model: str) -> Any:
    """vLLM without spans, in this process, with blocks of our size."""
    drivers: dict[str, EngineDriver] = {}

    def start(dtype: str, block_size: int) -> EngineDriver:
        if dtype not in drivers:
            drivers[dtype] = EngineDriver(
                {
                    "model": model,
                    "dtype": dtype,
                    "block_size": block_size,
                    "enforce_eager": True,
                    "max_model_len": 2048,
                    "kv_cache_memory_bytes": 2**27,
                }
            )
        return drivers[dtype]

    yield start
    for driver in drivers.values():
        driver.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_a_framed_span_hold_what_stock_vllm_writes(
    rigs: Any, stock: Any, dtype: str
) -> None:
    """For the ordinary prompt `prefix + span`. Not asked to the last bit: a matrix product over
    more rows adds up in another order. Keys and values here are of the order of 10."""
    from rig import Rig

    rig = rigs.get(dtype)
    make = PromptMaker(rig.engine.tokenizer, rig.config)
    size = rig.config.block_size
    prefix, spans = make.prefix(), make.spans(3)
    prompt = join(prefix, *spans, make.question())
    rig.reset()
    rig.run(prompt, SpanOptions("prefix"))
    ours = rig.block_content(rig.cached_blocks(prompt, SpanOptions("prefix")))

    plain = Rig(stock(dtype, size))
    at = len(prefix) // size
    for span in spans:
        ordinary = prefix + span
        plain.run([*ordinary, span[1]])
        theirs = plain.block_content(plain.cached_blocks(ordinary))
        num_blocks = len(span) // size
        mine = torch.cat([ours[:, : len(prefix) // size], ours[:, at : at + num_blocks]], dim=1)
        assert mine.shape == theirs.shape
        assert float((mine - theirs).abs().max()) <= CONTENT[dtype]
        at += num_blocks


def test_content_of_a_span_is_one_for_all_offsets(rig: Any, make: PromptMaker) -> None:
    """Computed first in one place or in another, a span's blocks hold the same, to rounding."""
    size = rig.config.block_size
    options = SpanOptions("prefix")
    prefix, question = make.prefix(), make.question()
    one, two = make.spans(2)
    content = []
    for spans in ((one, two), (two, one)):
        prompt = join(prefix, *spans, question)
        rig.reset()
        rig.run(prompt, options)
        at = len(join(prefix, *spans[: spans.index(one)])) // size
        blocks = rig.cached_blocks(prompt, options)[at : at + len(one) // size]
        content.append(rig.block_content(blocks))
    assert float((content[0] - content[1]).abs().max()) <= CONTENT[rig.dtype]


def test_warm_documents_around_a_cold_one_are_hit(
    exact_rig: Any,
) -> None:
    rig = exact_rig
    make = PromptMaker(rig.engine.tokenizer, rig.config)
    prefix, question, spans = make.prefix(), make.question(), make.spans(4)
    rig.reset()
    rig.run(join(prefix, *spans[:3], question))
    prompt = join(prefix, spans[2], spans[0], spans[3], spans[1], question)
    answer = rig.run(prompt)
    assert answer.cached_tokens == len(join(prefix, *spans[:3]))
    rig.reset()
    assert_same(rig, answer, rig.run(prompt))
