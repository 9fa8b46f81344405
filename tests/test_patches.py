"""Patches: what the segment table says of them, what it refuses, and how they are hashed."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from segment_prompts import (
    CONFIG,
    PAD,
    PDEP,
    SSEP,
    Drawn,
    all_options,
    given,
    patched_prompts,
    prompts,
)

from minipic_backend.attention.rows import split_runs
from minipic_backend.config import SpanOptions
from minipic_backend.errors import ConfigurationError, MalformedSpansError
from minipic_backend.spans.hashing import SpanHashChain
from minipic_backend.spans.patches import Patch
from minipic_backend.spans.segments import SegmentKind, parse_segments
from minipic_backend.spans.span_hashes import SpanHashes

A, B = 10, 11
SIZE = CONFIG.block_size
# [prefix][span of 6 + 2 pads][span of 4][head of the first][head of the second][question]
FRONT = [A] * 4 + [SSEP, A, A, A, A, A, PAD, PAD] + [SSEP, B, B, B]
EPIC = [*FRONT, SSEP, A, A, A, SSEP, B, B, B, PDEP, A]
HEADS = ((16, 4, 8), (20, 12, 16))


def parse(tokens: list[int], patches: Any, **options: Any) -> Any:
    return parse_segments(tokens, CONFIG, SpanOptions(patches=patches, **options))


def seen(table: Any, token: int) -> list[int]:
    """Tokens that a token sees, itself included."""
    (run,) = split_runs(table, token, token + 1)
    return [j for s in run.seen for j in range(s.start, min(s.end, token + 1))]


# ---- what a table says ----------------------------------------------------------------------


@pytest.mark.parametrize("offsets", ["compact", "padded"])
def test_heads_stand_where_their_spans_start(offsets: str) -> None:
    table = parse(EPIC, HEADS, offsets=offsets)
    pads = 0 if offsets == "compact" else 2
    assert [(s.kind.value, s.offset, s.cached_position) for s in table.segments] == [
        ("prefix", 0, 0),
        ("span", 4, 4),
        ("span", 10 + pads, 4),
        ("dependent", 4, 4),
        ("dependent", 10 + pads, 10 + pads),
        ("dependent", 14 + pads, 14 + pads),
    ]
    assert table.generated_position == 16 + pads


def test_who_sees_what() -> None:
    table = parse(EPIC, HEADS)
    prefix = [0, 1, 2, 3]
    assert seen(table, 9) == [*prefix, 4, 5, 6, 7, 8, 9]  # a span sees itself, whatever comes
    assert seen(table, 18) == [*prefix, 16, 17, 18]
    # The second head: the first in its new form, with its old rest; not its own old form.
    assert seen(table, 21) == [*prefix, 8, 9, 16, 17, 18, 19, 20, 21]
    assert seen(table, 25) == [*prefix, 8, 9, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25]


def test_markers_are_hidden_in_patches_too() -> None:
    table = parse(EPIC, HEADS, see_markers=False)
    assert 16 not in seen(table, 25)
    assert 20 not in seen(table, 25)
    assert 16 in seen(table, 17)  # but not from its own segment


def test_a_patch_of_a_middle_sees_the_old_beginning() -> None:
    table = parse([*FRONT, A, A, PAD, PAD, PDEP], [(16, 7, 9)])
    assert seen(table, 17) == [0, 1, 2, 3, 4, 5, 6, 16, 17]
    assert seen(table, 20) == [0, 1, 2, 3, 4, 5, 6, 9, 12, 13, 14, 15, 16, 17, 20]
    assert table.logical_positions(16, 18).tolist() == [7, 8]


@given(patched_prompts(), all_options)
def test_patches_move_nothing_else(drawn: Drawn, options: SpanOptions) -> None:
    """Every other segment stands where it would stand without them."""
    table = drawn.table(options)
    bare = [
        token
        for segment in table.segments
        if not segment.replaced
        for token in drawn.token_ids[segment.start : segment.end]
    ]
    plain = parse_segments(bare, CONFIG, options)
    assert plain is not None
    others = [s for s in table.segments if not s.replaced]
    assert [(s.kind, s.offset, s.cached_position, s.num_pads) for s in others] == [
        (s.kind, s.offset, s.cached_position, s.num_pads) for s in plain.segments
    ]


@given(patched_prompts(), all_options)
def test_every_position_is_seen_once(drawn: Drawn, options: SpanOptions) -> None:
    """From the end of the prompt: no two tokens of spans and patches at one logical position, and
    no range out of order."""
    table = drawn.table(options)
    last = len(drawn.token_ids) - 1
    tokens = seen(table, last)
    assert tokens == sorted(tokens)
    positions = table.logical_positions(0, last + 1)[tokens].tolist()
    assert len(set(positions)) == len(positions)
    assert len(split_runs(table, last, last + 1)[0].seen) <= table.max_seen


def test_options_survive_json() -> None:
    options = SpanOptions(patches=HEADS)  # type: ignore[arg-type]
    assert options.patches == (Patch(16, 4, 8), Patch(20, 12, 16))
    assert SpanOptions.from_dict(json.loads(json.dumps(options.to_dict()))) == options


# ---- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "patches", [5, "abc", [1], [(1, 2)], [(8, 4, 4)], [(8, 4, 9)], [(8, 1, 2), (8, 2, 3)],
                [(True, 0, 1)], [(8, -1, 2)]], ids=str,
)  # fmt: skip
def test_what_is_no_patch(patches: Any) -> None:
    with pytest.raises(ConfigurationError):
        SpanOptions(patches=patches)


def test_unknown_options_whatever_names_them() -> None:
    with pytest.raises(ConfigurationError, match="'speed'"):
        SpanOptions.from_dict({"speed": "high", 7: 1, None: 2})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("patches", "what"),
    [
        ([(18, 4, 8)], "inside a block"),
        ([(16, 0, 4)], "not those of one span"),
        ([(16, 7, 13)], "not those of one span"),
        ([(16, 4, 8), (20, 16, 18)], "not those of one span"),
        ([(16, 4, 8), (20, 7, 11)], "another one"),
        ([(16, 4, 6)], "longer than"),
        ([(24, 4, 8)], "ends the prompt"),
        ([(28, 4, 8)], "ends the prompt"),
    ],
    ids=str,
)
def test_patches_in_the_wrong_place(patches: Any, what: str) -> None:
    with pytest.raises(MalformedSpansError, match=what) as caught:
        parse(EPIC, patches)
    assert caught.value.token_index in {patch[0] for patch in patches}


def test_patches_need_spans() -> None:
    with pytest.raises(MalformedSpansError, match="without spans"):
        parse([A] * 12, [(8, 4, 8)])


# ---- places ---------------------------------------------------------------------------------


def test_placed_segments_and_what_follows_them() -> None:
    table = parse_segments(
        [*FRONT, PDEP, A, PAD, PAD, PDEP], CONFIG, SpanOptions(places=((12, 20), (16, 30)))
    )
    assert table is not None
    assert [s.offset for s in table.segments] == [0, 4, 20, 30, 32]
    assert [s.cached_position for s in table.segments] == [0, 4, 4, 30, 32]
    assert [s.is_placed for s in table.segments] == [False, False, True, True, False]
    assert table.generated_position == 33


def test_padded_offsets_do_not_fall_behind_a_place() -> None:
    table = parse_segments(
        [*FRONT, PDEP, A, PAD, PAD, PDEP], CONFIG, SpanOptions(offsets="padded", places=((12, 30),))
    )
    assert table is not None
    assert [s.offset for s in table.segments] == [0, 4, 30, 34, 36]


@pytest.mark.parametrize(
    ("place", "index"), [((0, 3), 0), ((13, 20), 13), ((12, 9), 12), ((40, 50), 40), ((16, 99), 16)]
)
def test_places_where_there_may_be_none(place: tuple[int, int], index: int) -> None:
    """The first segment, no segment, taken positions, behind the prompt, a patch."""
    with pytest.raises(MalformedSpansError) as caught:
        parse(EPIC, HEADS, places=[place])
    assert caught.value.token_index == index


@pytest.mark.parametrize("places", [[(1, 2, 3)], [(8, 9), (4, 20)], [(4, 9), (8, 5)], "12"])
def test_what_is_no_place(places: Any) -> None:
    with pytest.raises(ConfigurationError):
        SpanOptions(places=places)


def test_places_change_the_hashes_of_what_sees_them() -> None:
    """Not those of spans, whose blocks hold the same wherever they stand."""
    tokens = [*FRONT, PDEP, A, A, A, PDEP, A, A, A]
    plain = hashes(tokens, SpanOptions())
    for places in ([(12, 11)], [(16, 15)]):
        placed = hashes(tokens, SpanOptions(places=places))  # type: ignore[arg-type]
        assert placed[:4] == plain[:4]
        assert not set(placed[4:]) & set(plain[4:])
    one, two = (
        hashes(tokens, SpanOptions(places=[place]))  # type: ignore[arg-type,list-item]
        for place in ((12, 11), (12, 12))
    )
    assert not set(one[4:]) & set(two[4:])


# ---- hashes ---------------------------------------------------------------------------------


def hashes(tokens: list[int], options: SpanOptions) -> list[bytes]:
    table = parse_segments(tokens, CONFIG, options)
    assert table is not None
    chain = SpanHashChain(
        table,
        CONFIG,
        lambda value: hashlib.sha256(repr(value).encode()).digest(),
        b"nothing before",
        None,
        np.asarray(tokens, dtype=np.int64),
        SpanHashes(),
    )
    return chain.extend([], tokens, lambda start, end, salted: None)


def test_spans_keep_their_hashes_behind_which_all_differs() -> None:
    question = [PDEP, A, A, A]
    plain = hashes([*FRONT, *question], SpanOptions())
    epic = hashes([*EPIC, A, A], SpanOptions(patches=HEADS))  # type: ignore[arg-type]
    assert epic[:4] == plain[:4]
    assert not set(epic[4:]) & set(plain)


@given(st.one_of(prompts(min_segments=2), patched_prompts()), all_options, st.data())
def test_same_tokens_with_other_patches_share_only_what_is_in_front(
    drawn: Drawn, options: SpanOptions, data: st.DataObject
) -> None:
    if not drawn.patches:
        return
    kept = data.draw(st.integers(0, len(drawn.patches) - 1))
    dropped = drawn.patches[kept]
    one = hashes(drawn.token_ids, drawn.table(options).options)
    others = (
        *drawn.patches[:kept],
        dropped._replace(end=dropped.end - 1),
        *drawn.patches[kept + 1 :],
    )
    try:
        chosen = drawn.table(options).options
        changed = SpanOptions.from_dict({**chosen.to_dict(), "patches": others})
        two = hashes(drawn.token_ids, changed)
    except (ConfigurationError, MalformedSpansError):
        return
    at = dropped.at // SIZE
    assert one[:at] == two[:at]
    assert not set(one[at:]) & set(two[at:])


@given(patched_prompts(), all_options)
def test_patches_are_dependent_segments(drawn: Drawn, options: SpanOptions) -> None:
    for segment in drawn.table(options).segments:
        assert segment.replaced is None or segment.kind is SegmentKind.DEPENDENT
