"""Each fault of the paper's reference fork that applies here, as a test of its own.

docs/architecture.md lists them. Float32, so that a single poisoned span would show.
"""

from __future__ import annotations

from typing import Any

import pytest
from check import assert_same, assert_true
from prompts import PromptMaker, join

from minipic_backend import MalformedSpansError
from minipic_backend.config import SpanOptions

ISOLATED = SpanOptions("none")


@pytest.fixture
def rig(float32_rig: Any) -> Any:
    float32_rig.reset()
    return float32_rig


@pytest.fixture
def long_question(make: PromptMaker) -> list[int]:
    """More than two blocks, so that a hit on it would show in `cached_tokens`."""
    question = make.question("What do the documents say about Python, and which one is right? " * 5)
    assert len(question) > 2 * make.block_size
    return question


# ---- 1. PDep hashes the block, not the prompt before it -------------------------------------


def test_pdep_collision(rig: Any, make: PromptMaker, truth: Any, long_question: list[int]) -> None:
    """[sysA][d3][d4][q] and [sysB][d5][d4][q]: all but q is cached for the second."""
    other = make.prefix("You are terse. Never say more than one sentence.")
    d3, d4, d5 = make.spans(3)
    first = join(make.prefix(), d3, d4, long_question)
    second = join(other, d5, d4, long_question)
    rig.run(first, ISOLATED)
    rig.run(join(other, d5, make.question()), ISOLATED)
    answer = rig.run(second, ISOLATED)
    assert answer.cached_tokens == len(second) - len(long_question)
    assert_true(rig, truth, answer, second, ISOLATED)


# ---- 2. the salt of token 0 is forgotten at each span ---------------------------------------


@pytest.mark.parametrize("frame", ["none", "prefix"])
def test_salt_leak(rig: Any, make: PromptMaker, long_question: list[int], frame: Any) -> None:
    """No tenant hits another's blocks, whoever came first."""
    options = SpanOptions(frame)
    prompt = join(make.prefix(), *make.spans(2), long_question)
    hit = (len(prompt) - 1) // make.block_size * make.block_size
    for salt in (None, "one", "two"):
        assert rig.run(prompt, options, salt=salt).cached_tokens == 0
    for salt in (None, "one", "two"):
        assert rig.run(prompt, options, salt=salt).cached_tokens == hit


@pytest.mark.parametrize("frame", ["none", "prefix"])
def test_salt_leak_without_a_prefix(rig: Any, make: PromptMaker, frame: Any) -> None:
    options = SpanOptions(frame)
    one, two = make.spans(2)
    rig.run(join(one, two, make.question()), options, salt="one")
    for salt in (None, "two"):
        assert rig.run(join(two, one, make.question()), options, salt=salt).cached_tokens == 0
        rig.reset()
        rig.run(join(one, two, make.question()), options, salt="one")


def test_salt_miss(rig: Any, make: PromptMaker) -> None:
    """A span computed alone under a salt is hit under the same salt, inside a prompt and first in
    one, and by no other salt."""
    one, two = make.spans(2)
    rig.run(one, ISOLATED, salt="tenant")
    rig.run(two, ISOLATED, salt="tenant")
    # Of a lone span that is cached whole, vLLM computes the last block again, into another block.
    prompt = join(two, one, make.question())
    for salt in ("other", None):
        assert rig.run(prompt, ISOLATED, salt=salt).cached_tokens == 0
    assert rig.run(prompt, ISOLATED, salt="tenant").cached_tokens == len(two) + len(one)


def test_a_lone_span_is_hit_without_a_salt(rig: Any, make: PromptMaker, truth: Any) -> None:
    spans = make.spans(3)
    for span in spans:
        rig.run(span, ISOLATED)
    prompt = join(*reversed(spans), make.question())
    answer = rig.run(prompt, ISOLATED)
    assert answer.cached_tokens == len(join(*spans))
    assert_true(rig, truth, answer, prompt, ISOLATED)


# ---- 3. a missing span is computed with everything in view and published as independent -----


def test_poisoning_when_cold(rig: Any, make: PromptMaker, truth: Any, options: SpanOptions) -> None:
    """Never computed alone before, a span stands behind two others; then it stands alone."""
    prefix, question, spans = make.prefix(), make.question(), make.spans(3)
    rig.run(join(prefix, *spans, question), options)
    alone = join(prefix, spans[2], question)
    answer = rig.run(alone, options)
    assert answer.cached_tokens == len(prefix) + len(spans[2])
    assert_true(rig, truth, answer, alone, options)


def test_poisoning_after_eviction(
    rig: Any, make: PromptMaker, truth: Any, options: SpanOptions
) -> None:
    """A span is evicted, computed again behind others, and then used alone."""
    size = make.block_size
    prefix, question, spans = make.prefix(), make.question(), make.spans(3)
    whole, alone = join(prefix, *spans, question), join(prefix, spans[2], question)
    rig.run(whole, options)
    before = len(join(prefix, *spans[:2])) // size
    lost = rig.cached_blocks(whole, options)[before : before + len(spans[2]) // size]
    rig.evict(lost)
    assert rig.run(whole, options).cached_tokens == before * size
    answer = rig.run(alone, options)
    assert answer.cached_tokens == len(prefix) + len(spans[2])
    assert_true(rig, truth, answer, alone, options)


def test_poisoning_after_eviction_by_other_requests(
    rig: Any, make: PromptMaker, truth: Any
) -> None:
    """The cache holds one prompt; many take turns, with documents in common."""
    spans, question, prefix = make.spans(8), make.question(), make.prefix()
    orders = ((0, 1, 2), (3, 1, 4), (5, 0, 1), (2, 6, 0), (1, 7, 2), (0, 1, 2))
    prompts = [join(prefix, *(spans[i] for i in order), question) for order in orders]
    room = max(map(len, prompts)) // make.block_size + 6
    cached = []
    with rig.shrunk(room):
        for prompt in prompts:
            answer = rig.run(prompt)
            cached.append(answer.cached_tokens)
            assert_true(rig, truth, answer, prompt)
    assert 0 < min(cached[1:]) < max(cached) < max(map(len, prompts)) - len(question)


@pytest.mark.parametrize("chunk", [2048, 64], ids=["decoding", "prefilling"])
@pytest.mark.parametrize("options", [SpanOptions(), ISOLATED], ids=["prefix", "none"])
def test_poisoning_after_preemption(
    rig: Any, make: PromptMaker, truth: Any, options: SpanOptions, chunk: int
) -> None:
    """A request loses its blocks half-way, starts again, and leaves its spans to the next one."""
    size = make.block_size
    prefix, question, spans = make.prefix(), make.question(), make.spans(4)
    prompt = join(prefix, *spans, question)
    older = make.encode("Lists and tuples are sequences; dictionaries are mappings. " * 40)
    older = older[: 4 * size - 2]
    with rig.shrunk(4 + -(-len(prompt) // size)), rig.chunked(chunk), rig.watched() as steps:
        with rig.paused():
            handle = rig.submit(older, num_tokens=12)
            ours = rig.submit(prompt, options, num_tokens=6, request_id="ours")
        rig.read(handle)
        assert_true(rig, truth, rig.read(ours), prompt, options)
        assert steps.preemptions("ours") > 0
        for order in ((3, 2, 1, 0), (2,), (1,)):
            other = join(prefix, *(spans[i] for i in order), question)
            assert_true(rig, truth, rig.run(other, options), other, options)
    rig.reset()


def test_poisoning_by_a_prompt_logprobs_request(
    rig: Any, make: PromptMaker, truth: Any, options: SpanOptions
) -> None:
    """Such a request reads nothing from the cache, but writes it."""
    prefix, question, spans = make.prefix(), make.question(), make.spans(3)
    prompt = join(prefix, *spans, question)
    for _ in range(2):
        answer = rig.run(prompt, options, prompt_logprobs=1)
        assert answer.cached_tokens == 0
        assert_true(rig, truth, answer, prompt, options)
    other = join(prefix, spans[2], spans[0], question)
    answer = rig.run(other, options)
    assert answer.cached_tokens == len(other) - len(question)
    assert_true(rig, truth, answer, other, options)


def test_prompt_ending_at_a_spans_end(rig: Any, make: PromptMaker, truth: Any) -> None:
    """Refused; a lone span is served, and what it leaves in the cache is right."""
    prefix, spans = make.prefix(), make.spans(2)
    for prompt in (join(prefix, *spans), join(*spans), join(prefix, spans[0])):
        with pytest.raises(MalformedSpansError, match="ends in a span") as caught:
            rig.run(prompt)
        assert prompt[caught.value.token_index] == rig.config.ssep
    assert rig.run(spans[0], ISOLATED, num_tokens=3).cached_tokens == 0
    prompt = join(spans[1], spans[0], make.question())
    answer = rig.run(prompt, ISOLATED)
    assert_true(rig, truth, answer, prompt, ISOLATED)


# ---- 5. markers are text --------------------------------------------------------------------


@pytest.mark.parametrize("which", ["ssep", "pdep", "pad"])
@pytest.mark.parametrize("lone", [False, True], ids=["question", "lone span"])
def test_marker_in_generated_text(exact_rig: Any, truth: Any, which: str, lone: bool) -> None:
    """More than a block full of it, at block starts too, changes neither what is generated nor
    what is cached; vLLM can even preempt the request in the middle."""
    rig = exact_rig
    make = PromptMaker(rig.engine.tokenizer, rig.config)
    marker = getattr(rig.config, which)
    size = make.block_size
    (span,) = make.spans(1)
    prompt = span if lone else join(make.prefix(), span, make.question("Why? " * 8)[: size - 3])
    num_tokens = -len(prompt) % size + size + 2
    rig.reset()
    answer = rig.run(prompt, ISOLATED, num_tokens=num_tokens, allowed_token_ids=[marker])
    assert set(answer.token_ids) == {marker}
    assert_true(rig, truth, answer.first(5), prompt, ISOLATED)
    # The span and other prompts are as before.
    later = join(make.prefix(), *make.spans(2, first=1), span, make.question())
    assert_true(rig, truth, rig.run(later, ISOLATED), later, ISOLATED)

    if which != "ssep":
        return
    # Preempted after a block and more was generated: vLLM then prefills prompt and generated
    # tokens together, as far as the cache does not have them.
    older = make.encode("Lists and tuples are sequences; dictionaries are mappings. " * 40)
    older = older[: 3 * size - 2]
    rig.reset()
    room = 4 + -(-len(prompt) // size) + 1  # till each has generated a block
    with rig.shrunk(room), rig.watched() as steps:
        with rig.paused():
            first = rig.submit(older, num_tokens=num_tokens + 5)
            second = rig.submit(
                prompt,
                ISOLATED,
                num_tokens=num_tokens,
                allowed_token_ids=[marker],
                request_id="ours",
            )
        rig.read(first)
        preempted = rig.read(second)
    assert steps.preemptions("ours") > 0
    before = [share for share in steps.of("ours") if not share.num_preemptions]
    assert before[-1].start >= len(prompt) + size - 2
    assert_same(rig, preempted, answer)


def test_generated_blocks_are_hit_by_the_next_turn(rig: Any, make: PromptMaker, truth: Any) -> None:
    """An answer that holds no marker is the beginning of the next turn's dependent segment."""
    size = make.block_size
    prompt = join(make.prefix(), *make.spans(2), make.question())
    answer = rig.run(prompt, num_tokens=2 * size)
    turn = [*prompt, *answer.token_ids, *make.encode("\nAnd why is that so?\n")]
    again = rig.run(turn)
    assert again.cached_tokens == (len(prompt) + 2 * size - 1) // size * size
    assert_true(rig, truth, again, turn)


# ---- 8. a span whose last block equals another's --------------------------------------------


def test_span_whose_last_block_equals_another(rig: Any, make: PromptMaker, truth: Any) -> None:
    size = make.block_size
    tail = make.encode("and the rest of these two documents is the same, word for word, " * 4)[
        :size
    ]
    one, two = (
        [rig.config.ssep, *make.encode(text * 9)[: size - 1], *tail]
        for text in ("A document about apples. ", "Some other text about pears. ")
    )
    assert one[size:] == two[size:]
    question = make.question()
    for prompt in (
        join(make.prefix(), one, two, question),
        join(make.prefix(), two, one, question),
        join(make.prefix(), one, question),
        join(make.prefix(), two, question),
    ):
        blocks = rig.request(prompt, ISOLATED).block_hashes
        assert len(set(blocks)) == len(blocks)
        assert_true(rig, truth, rig.run(prompt, ISOLATED), prompt, ISOLATED)
