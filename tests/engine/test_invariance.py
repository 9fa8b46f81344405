"""The answer depends on the prompt alone, never on what is cached or what runs beside it.

One prompt, [prefix][SSep d1]…[SSep d5][PDep question], computed in every way there is. The cold
answer is held against the float64 reference, all others against the cold one.
"""

from __future__ import annotations

from typing import Any

import pytest
from check import assert_same, assert_true
from conftest import OPTIONS
from prompts import PromptMaker

from minipic_backend.config import SpanOptions
from minipic_backend.spans.segments import parse_segments

NUM_TOKENS = 4  # one from prefill, three from decoding
_cold: dict[Any, Any] = {}


def run_cold(
    rig: Any, prompt: list[int], options: SpanOptions | None = None, num_tokens: int = NUM_TOKENS
) -> Any:
    """The answer with nothing in the cache; computed once."""
    key = (rig, tuple(prompt), options, num_tokens)
    if key not in _cold:
        rig.reset()
        _cold[key] = rig.run(prompt, options, num_tokens=num_tokens)
        assert _cold[key].cached_tokens == 0
    return _cold[key]


@pytest.fixture
def prompt(make: Any) -> list[int]:
    return make.usual(5)  # type: ignore[no-any-return]


@pytest.fixture
def cold(rig: Any, prompt: list[int], options: SpanOptions) -> Any:
    return run_cold(rig, prompt, options)


def test_cold_answer_is_the_reference(
    rig: Any, truth: Any, prompt: list[int], options: SpanOptions, cold: Any
) -> None:
    assert_true(rig, truth, cold, prompt, options)


def test_warm(rig: Any, make: Any, prompt: list[int], options: SpanOptions, cold: Any) -> None:
    rig.reset()
    rig.run(prompt, options)
    warm = rig.run(prompt, options, num_tokens=NUM_TOKENS)
    assert warm.cached_tokens == len(prompt) - len(make.question())
    assert_same(rig, warm, cold)


def readable_tokens(
    config: Any, prompt: list[int], options: SpanOptions, lost: tuple[int, ...]
) -> int:
    """Cached tokens of a prompt's prefix and spans: of each, those in front of its first loss."""
    table = parse_segments(prompt, config, options)
    assert table is not None
    readable = 0
    for segment in table.segments[:-1]:
        blocks = range(segment.start // config.block_size, segment.end // config.block_size)
        first_lost = min({*lost, blocks.stop} & {*blocks, blocks.stop})
        readable += (first_lost - blocks.start) * config.block_size
    return readable


@pytest.mark.parametrize("lost", [(0, 3), (4, 5, 7)], ids=str)
def test_partly_evicted(
    rig: Any, make: Any, prompt: list[int], options: SpanOptions, cold: Any, lost: tuple[int, ...]
) -> None:
    rig.reset()
    rig.run(prompt, options)
    blocks = rig.cached_blocks(prompt, options)
    rig.evict([blocks[index] for index in lost])
    assert [i for i, b in enumerate(rig.cached_blocks(prompt, options)) if b is None] == [*lost]

    partly = rig.run(prompt, options, num_tokens=NUM_TOKENS)
    assert partly.cached_tokens == readable_tokens(rig.config, prompt, options, lost)
    assert_same(rig, partly, cold)
    again = rig.run(prompt, options)
    assert again.cached_tokens == len(prompt) - len(make.question())
    assert_same(rig, again, cold.first(1))


@pytest.mark.parametrize("chunk", [33, 64, 100])
def test_chunked_prefill(
    rig: Any, prompt: list[int], options: SpanOptions, cold: Any, chunk: int
) -> None:
    rig.reset()
    with rig.chunked(chunk), rig.watched() as steps:
        chunked = rig.run(prompt, options, num_tokens=NUM_TOKENS, request_id="chunked")
    full, rest = divmod(len(prompt), chunk)
    assert steps.chunks("chunked") == [chunk] * full + [rest] * bool(rest) + [1] * (NUM_TOKENS - 1)
    assert_same(rig, chunked, cold)


def test_in_a_mixed_batch(
    rig: Any, make: Any, prompt: list[int], options: SpanOptions, cold: Any
) -> None:
    """Prefilled in chunks beside an ordinary prompt and another span prompt that decode, and
    decoded beside an ordinary prompt and another span prompt that prefill."""
    other_options = OPTIONS["none-padded" if options.frame == "prefix" else "prefix-compact"]
    other = make.usual(3, first=20)
    ordinary = make.encode("Generators are functions that yield values one at a time. " * 3)
    late = make.usual(2, first=30)
    rig.reset()
    with rig.chunked(100), rig.watched() as steps:
        with rig.paused():
            handles = {
                "ordinary": rig.submit(ordinary, num_tokens=7, request_id="ordinary"),
                "other": rig.submit(other, other_options, num_tokens=7, request_id="other"),
                "target": rig.submit(prompt, options, num_tokens=NUM_TOKENS, request_id="target"),
                "late": rig.submit(late, options, request_id="late"),
            }
        answers = {name: rig.read(handle) for name, handle in handles.items()}

    def together(name: str, prefilling: bool) -> bool:
        return any(
            (step["target"].count > 1) == prefilling and name in step
            for step in steps.steps
            if "target" in step
        )

    assert together("ordinary", prefilling=True)
    assert together("other", prefilling=True)
    assert any(
        step["target"].count == 1 and step["late"].count > 1
        for step in steps.steps
        if {"target", "late"} <= set(step)
    )
    assert_same(rig, answers["target"], cold)
    assert_same(rig, answers["ordinary"], run_cold(rig, ordinary, num_tokens=7))
    assert_same(rig, answers["other"], run_cold(rig, other, other_options, num_tokens=7))
    assert_same(rig, answers["late"], run_cold(rig, late, options, num_tokens=1))


@pytest.mark.parametrize("when", ["decoding", "prefilling"])
def test_preempted(
    rig: Any, make: Any, prompt: list[int], options: SpanOptions, cold: Any, when: str
) -> None:
    """An older request takes the blocks of ours, which starts again later."""
    size = rig.config.block_size
    first = make.encode("Lists and tuples are sequences; dictionaries are mappings. " * 40)
    first = first[: 4 * size - 2]  # its third generated token needs a fifth block
    room = 4 + -(-len(prompt) // size)
    rig.reset()
    with rig.shrunk(room), rig.chunked(2048 if when == "decoding" else 64), rig.watched() as steps:
        with rig.paused():
            handle = rig.submit(first, num_tokens=12)
            ours = rig.submit(prompt, options, num_tokens=NUM_TOKENS, request_id="ours")
        rig.read(handle)
        preempted = rig.read(ours)
    assert steps.preemptions("ours") > 0
    before = [share for share in steps.of("ours") if not share.num_preemptions]
    reached = before[-1].start + before[-1].count
    assert (reached > len(prompt)) == (when == "decoding")
    assert_same(rig, preempted, cold)


@pytest.mark.parametrize("num_documents", range(1, 13))
def test_one_to_twelve_documents(float32_rig: Any, truth: Any, num_documents: int) -> None:
    """Cold and warm; by turns in both frames and with both offset layouts."""
    rig = float32_rig
    make = PromptMaker(rig.engine.tokenizer, rig.config)
    options = list(OPTIONS.values())[num_documents % 4]
    prompt = make.usual(num_documents)
    rig.reset()
    cold = rig.run(prompt, options)
    warm = rig.run(prompt, options)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == len(prompt) - len(make.question())
    assert_true(rig, truth, cold, prompt, options)
    assert_same(rig, warm, cold)


def test_twelve_documents_in_chunks_of_512(rig: Any, make: Any) -> None:
    prompt = make.usual(12, first=40)
    for name in ("prefix-compact", "none-padded"):
        options = OPTIONS[name]
        rig.reset()
        whole = rig.run(prompt, options)
        rig.reset()
        with rig.chunked(512), rig.watched() as steps:
            chunked = rig.run(prompt, options, request_id="chunked")
        assert steps.chunks("chunked") == [512, len(prompt) - 512]
        assert_same(rig, chunked, whole)
