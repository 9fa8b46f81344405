"""Block hashes: equal where two blocks hold the same, never where they do not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example
from hypothesis import strategies as st
from segment_prompts import (
    CONFIG,
    PAD,
    PDEP,
    SSEP,
    Drawn,
    all_options,
    given,
    prompts,
    words,
)

from minipic_backend.config import SpanConfig, SpanOptions
from minipic_backend.errors import MalformedSpansError
from minipic_backend.spans.hashing import SpanHashChain
from minipic_backend.spans.segments import SegmentKind, parse_segments
from minipic_backend.spans.span_hashes import SpanHashes

SIZE = CONFIG.block_size
DEFAULTS = SpanOptions()
NONE_HASH = b"nothing before"


def digest(value: Any) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


@dataclass(frozen=True)
class Asked:
    """A request: prompt, what was generated so far, and its settings."""

    prompt: tuple[int, ...]
    generated: tuple[int, ...] = ()
    options: SpanOptions = DEFAULTS
    salt: str | None = None
    lora: str | None = None
    config: SpanConfig = CONFIG
    known: SpanHashes = field(default_factory=SpanHashes, compare=False)

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.generated

    def extra_keys(self, start: int, end: int, salted: bool = True) -> tuple[Any, ...] | None:
        """As vLLM gives them: LoRA in every block, the salt in the first."""
        keys = [self.lora] if self.lora else []
        keys += [self.salt] if self.salt and salted and start == 0 else []
        return tuple(keys) or None

    def chain(self, hash_function: Any = digest) -> SpanHashChain:
        table = parse_segments(self.prompt, self.config, self.options)
        assert table is not None
        prompt = np.asarray(self.prompt, dtype=np.int64)
        return SpanHashChain(
            table, self.config, hash_function, NONE_HASH, self.salt, prompt, self.known
        )

    def hashes(self) -> list[bytes]:
        return self.chain().extend([], self.tokens, self.extra_keys)

    def stock(self, tokens: Sequence[int]) -> list[bytes]:
        """What vLLM's hasher gives to an ordinary prompt."""
        parent, found = NONE_HASH, []
        for start in range(0, len(tokens) - SIZE + 1, SIZE):
            block = tuple(tokens[start : start + SIZE])
            parent = digest((parent, block, self.extra_keys(start, start + SIZE)))
            found.append(parent)
        return found

    def contents(self) -> Iterator[tuple[Any, ...]]:
        """For each full block, all that its keys and values depend on."""
        table = parse_segments(self.prompt, self.config, self.options)
        assert table is not None
        tenant = (self.salt, self.lora)
        kinds = [(s.kind, s.start, s.end) for s in table.segments]
        frame = self.tokens[: table.num_frame_tokens]
        for start in range(0, len(self.tokens) - SIZE + 1, SIZE):
            end = start + SIZE
            kind, begin, _ = next(
                (k for k in kinds if k[1] <= start < k[2]), (SegmentKind.DEPENDENT, 0, 0)
            )
            if kind is SegmentKind.PREFIX:
                yield ("plain", tenant, self.tokens[:end])
            elif kind is SegmentKind.SPAN and end <= len(self.prompt):
                own = self.tokens[begin:end]
                if frame:
                    yield ("plain", tenant, frame + own)
                else:
                    yield ("span", tenant, self.config.key_encoding, own)
            else:
                # The frame is that of the spans in front; those behind change nothing.
                has_spans = any(k[0] is SegmentKind.SPAN and k[1] < start for k in kinds)
                yield (
                    "dependent",
                    tenant,
                    self.config.key_encoding,
                    self.options.offsets,
                    self.options.see_markers,
                    len(frame) if has_spans else 0,
                    self.tokens[:end],
                    # Behind a lone span, what was generated is another kind of token.
                    len(self.prompt) if table.last.kind is SegmentKind.SPAN else None,
                )


generated = st.lists(st.one_of(words, st.sampled_from([SSEP, PDEP, PAD])), max_size=10).map(tuple)
salts = st.sampled_from([None, "a", "b"])
configs = st.sampled_from([CONFIG, replace(CONFIG, key_encoding="unrotated")])


@st.composite
def related(draw: st.DrawFn) -> tuple[Asked, Asked]:
    """Two requests with parts in common: a prefix, some documents, a question, some settings."""
    one, two = draw(prompts()), draw(prompts())
    parts = [*one.parts, *two.parts]
    heads = [part for part in parts if part[0] not in (SSEP, PDEP)]
    whole = [part for part in parts if part[0] in (SSEP, PDEP) and len(part) % SIZE == 0]
    ends = [part for part in parts if part[0] == PDEP and PAD not in part]

    def prompt() -> tuple[int, ...]:
        if whole and draw(st.integers(0, 5)) == 0:
            lone = draw(st.sampled_from(whole))
            if lone[0] == SSEP:
                length = draw(st.integers(1, len(lone)))
                return lone[:length]
        chosen = [draw(st.sampled_from(heads))] if heads and draw(st.booleans()) else []
        chosen += draw(st.lists(st.sampled_from(whole), max_size=4)) if whole else []
        chosen.append(draw(st.sampled_from(ends)) if ends else (PDEP,))
        return tuple(token for part in chosen for token in part)

    settings = [
        {
            "options": draw(all_options),
            "salt": draw(salts),
            "lora": draw(st.sampled_from([None, "adapter"])),
            "config": draw(configs),
        }
        for _ in range(2)
    ]
    if draw(st.booleans()):
        settings[1] = settings[0]
    asked = [Asked(prompt(), draw(generated), **values) for values in settings]
    return asked[0], asked[1]


WITHOUT_SPANS = (10, 10, 10, 10, PDEP, 10, 10, 10)


def _pair(one: Asked, two: Asked) -> tuple[Asked, Asked]:
    return one, two


@given(related())
@example(
    _pair(
        Asked((SSEP, 10), (11, 12), SpanOptions(see_markers=False)),
        Asked((SSEP, 10, 11), (12,), SpanOptions(see_markers=False)),
    )
)
@example(_pair(Asked((SSEP, 10), (PAD, 12)), Asked((SSEP, 10, PAD), (12,))))
@example(_pair(Asked(WITHOUT_SPANS), Asked((*WITHOUT_SPANS, SSEP, 10, 10, 10, PDEP, 10))))
def test_blocks_that_differ_never_share_a_hash(pair: tuple[Asked, Asked]) -> None:
    known: dict[bytes, tuple[Any, ...]] = {}
    for asked in pair:
        for block_hash, content in zip(asked.hashes(), asked.contents(), strict=True):
            assert known.setdefault(block_hash, content) == content


@given(related())
def test_spans_and_prefixes_that_are_the_same_share_a_hash(pair: tuple[Asked, Asked]) -> None:
    known: dict[tuple[Any, ...], bytes] = {}
    for asked in pair:
        for block_hash, content in zip(asked.hashes(), asked.contents(), strict=True):
            if content[0] != "dependent":
                assert known.setdefault(content, block_hash) == block_hash


@given(prompts(min_segments=2), prompts(min_segments=2), all_options)
def test_another_prompt_before_gives_another_dependent_hash(
    one: Drawn, two: Drawn, options: SpanOptions
) -> None:
    """The fork's PDep hash forgot the prompt before it; ours differs from the first block on."""
    question = (PDEP, *range(20, 20 + 2 * SIZE))
    heads = [tuple(t for part in drawn.parts[:-1] for t in part) for drawn in (one, two)]
    if heads[0] == heads[1]:
        return
    tails = [
        Asked(head + question, options=options).hashes()[len(head) // SIZE :] for head in heads
    ]
    assert not set(tails[0]) & set(tails[1])


@given(prompts(), all_options, salts)
def test_prefix_and_framed_spans_have_stock_hashes(
    drawn: Drawn, options: SpanOptions, salt: str | None
) -> None:
    asked = Asked(tuple(drawn.token_ids), options=options, salt=salt)
    table = drawn.table(options)
    hashes, at = asked.hashes(), 0
    for segment, part in zip(table.segments, drawn.parts, strict=True):
        frame = asked.prompt[: table.num_frame_tokens]
        num_blocks = len(part) // SIZE
        own = hashes[at : at + num_blocks]
        if segment.kind is SegmentKind.PREFIX:
            assert own == asked.stock(part)
        elif segment.kind is SegmentKind.SPAN and frame:
            assert own == asked.stock(frame + part)[len(frame) // SIZE :]
        else:
            assert not set(own) & set(asked.stock(asked.prompt))
        at += num_blocks


@given(prompts(), all_options, generated, st.data())
def test_hashes_do_not_depend_on_how_tokens_arrive(
    drawn: Drawn, options: SpanOptions, more: tuple[int, ...], data: st.DataObject
) -> None:
    """vLLM asks at the start, then each time that tokens were generated."""
    asked = Asked(tuple(drawn.token_ids), more, options)
    chain, hashes = asked.chain(), []
    length = len(asked.prompt)
    while True:
        hashes += chain.extend(hashes, asked.tokens[:length], asked.extra_keys)
        if length == len(asked.tokens):
            break
        length = data.draw(st.integers(length + 1, len(asked.tokens)))
    assert hashes == asked.hashes()
    assert len(hashes) == len(asked.tokens) // SIZE


@given(prompts(), all_options, generated.filter(bool))
def test_generated_tokens_are_never_in_a_spans_chain(
    drawn: Drawn, options: SpanOptions, more: tuple[int, ...]
) -> None:
    """Whatever they are, markers too: the same tokens as a span of their own, or as the rest of a
    lone span, hash differently."""
    asked = Asked(tuple(drawn.token_ids), more, options)
    begin = len(asked.prompt) // SIZE
    ours = set(asked.hashes()[begin:])
    own_segment = (*drawn.parts[-1], *more)
    for span in ((SSEP, *own_segment[1:]), asked.tokens):
        try:
            table = parse_segments(span, CONFIG, options)
        except MalformedSpansError:
            continue
        if table is not None and table.last.kind is SegmentKind.SPAN:
            assert not ours & set(Asked(span, options=options).hashes())


@given(prompts(max_segments=12), all_options, generated)
def test_each_block_costs_a_bounded_number_of_hashes(
    drawn: Drawn, options: SpanOptions, more: tuple[int, ...]
) -> None:
    asked = Asked(tuple(drawn.token_ids), more, options)
    calls = []

    def counting(value: Any) -> bytes:
        calls.append(value)
        return digest(value)

    chain = asked.chain(counting)
    assert len(calls) <= 2
    calls.clear()
    hashes = chain.extend([], asked.tokens, asked.extra_keys)
    # the block itself, the running digest, the parent of a dependent segment
    assert len(calls) <= 3 * len(hashes)
    assert all(len(repr(value)) < 800 for value in calls)  # of bounded size each


def test_number_of_hashes_grows_linearly_in_one_segment() -> None:
    calls = []
    asked = Asked((SSEP, *range(100, 100 + 50 * SIZE - 1)))

    def counting(value: Any) -> bytes:
        calls.append(value)
        return digest(value)

    chain = asked.chain(counting)
    calls.clear()
    assert len(chain.extend([], asked.tokens, asked.extra_keys)) == len(calls) == 50


def test_what_is_seen_of_the_prefix_enters_dependent_hashes_alone() -> None:
    prompt = tuple([10] * 2 * SIZE + [SSEP, 11, 12, 13] + [PDEP, *range(20, 19 + 2 * SIZE)])
    known: list[list[bytes]] = [
        Asked(prompt, (7,) * SIZE, SpanOptions(seen_prefix=number)).hashes()
        for number in (None, 0, 1, SIZE, 2 * SIZE - 1)
    ]
    assert len({tuple(hashes[:3]) for hashes in known}) == 1
    assert len({h for hashes in known for h in hashes[3:]}) == 5 * 3


@pytest.mark.parametrize("frame", ["none", "prefix"])
def test_place_of_a_span_does_not_enter_its_hash(frame: Any) -> None:
    options = SpanOptions(frame)
    head = tuple(range(10, 10 + SIZE))
    document = (SSEP, 20, 21, 22, 23, PAD, PAD, PAD)
    others = (SSEP, 30, 31, PAD, SSEP, 40, 41, 42)
    first = Asked((*head, *document, *others, PDEP), options=options).hashes()
    last = Asked((*head, *others, *document, PDEP), options=options).hashes()
    assert first[1:3] == last[3:5]


def test_equal_last_blocks_of_different_spans_differ() -> None:
    tail = (50, 51, 52, 53)
    one, two = (SSEP, 20, 21, 22, *tail), (SSEP, 30, 31, 32, *tail)
    hashes = Asked((*one, *two, PDEP)).hashes()
    assert len(set(hashes)) == 4


@pytest.mark.parametrize("frame", ["none", "prefix"])
def test_salt_enters_every_block(frame: Any) -> None:
    prompt = (10, 11, 12, 13, SSEP, 20, 21, 22, PDEP, 30, 31, 32)
    by_salt = [
        set(Asked(prompt, options=SpanOptions(frame), salt=s).hashes()) for s in (None, "a", "b")
    ]
    assert not by_salt[0] & by_salt[1]
    assert not by_salt[1] & by_salt[2]
    assert not by_salt[0] & by_salt[2]
    assert [len(hashes) for hashes in by_salt] == [3, 3, 3]


def test_a_salted_span_alone_has_the_hash_that_it_has_in_a_prompt() -> None:
    span = (SSEP, 20, 21, 22)
    options = SpanOptions("none")
    alone = Asked(span, options=options, salt="a").hashes()
    placed = Asked((10, 11, 12, 13, *span, PDEP), options=options, salt="a").hashes()
    assert placed[1:2] == alone


def test_a_known_span_gives_the_hashes_of_a_new_one() -> None:
    """For any order of requests; the key holds all that the hashes depend on."""
    known = SpanHashes()
    prefix, other = (47,) * SIZE, (48,) * SIZE
    spans = [(CONFIG.ssep, *range(50 + i, 50 + i + 2 * SIZE - 1)) for i in range(3)]
    question = (CONFIG.pdep, 49)
    for salt in (None, "a", "b"):
        for lora in (None, "adapter"):
            for options in (SpanOptions(), SpanOptions(frame="none")):
                for head in (prefix, other, ()):
                    for order in ([0, 1, 2], [2, 0, 1], [1, 1]):
                        body = tuple(token for i in order for token in spans[i])
                        fresh = Asked((*head, *body, *question), (), options, salt, lora)
                        assert replace(fresh, known=known).hashes() == fresh.hashes()


def test_known_spans_and_prefixes_cost_no_hashes() -> None:
    known, calls = SpanHashes(), []

    def counting(value: Any) -> bytes:
        calls.append(value)
        return digest(value)

    body = (*range(20, 20 + 5 * SIZE), SSEP, *range(50, 50 + 4 * SIZE - 1), PDEP)
    for question in ((60, 61), (70, 71)):
        calls.clear()
        asked = Asked((*body, *question), known=known)
        asked.chain(counting).extend([], asked.tokens, asked.extra_keys)
    assert len(calls) < 8


def test_known_spans_are_bounded_by_their_tokens() -> None:
    known = SpanHashes(max_tokens=10)
    for name, size in (("a", 4), ("b", 4), ("c", 4)):
        known.put((name,), size, [name.encode()])
        known.get(("a",))
    known.put(("huge",), 11, [])
    assert [known.get((name,)) for name in ("a", "b", "c", "huge")] == [[b"a"], None, [b"c"], None]
