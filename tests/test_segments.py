"""The segment table: what it says of every token, and what it refuses."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch
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

from minipic_backend.attention.rows import split_runs
from minipic_backend.config import SpanOptions
from minipic_backend.errors import ConfigurationError, MalformedSpansError
from minipic_backend.spans.patches import Patch
from minipic_backend.spans.segments import SegmentKind, SegmentTable, parse_segments

A, B = 10, 11
PREFIX, SPAN, DEPENDENT = SegmentKind.PREFIX, SegmentKind.SPAN, SegmentKind.DEPENDENT
# [prefix of 2 blocks][span of 5 + 3 pads][span of 4][dependent of 3]
USUAL = [A] * 8 + [SSEP, A, A, A, A, PAD, PAD, PAD] + [SSEP, B, B, B] + [PDEP, A, A]


def parse(token_ids: list[int], **options: object) -> SegmentTable:
    table = parse_segments(token_ids, CONFIG, SpanOptions(**options))  # type: ignore[arg-type]
    assert table is not None
    return table


def rows(table: SegmentTable) -> list[tuple[SegmentKind, int, int, int, int, int]]:
    return [
        (s.kind, s.start, s.end, s.num_pads, s.offset, s.cached_position) for s in table.segments
    ]


# ---- what it reads --------------------------------------------------------------------------


def test_compact_behind_the_prefix() -> None:
    assert rows(parse(USUAL)) == [
        (PREFIX, 0, 8, 0, 0, 0),
        (SPAN, 8, 16, 3, 8, 8),
        (SPAN, 16, 20, 0, 13, 8),
        (DEPENDENT, 20, 23, 0, 17, 17),
    ]


def test_the_end_of_a_prefix_may_be_for_spans_alone() -> None:
    table = parse(USUAL, seen_prefix=5)
    assert rows(table) == rows(parse(USUAL))
    assert [(a, b) for _, a, b in table.seen_before(3)] == [(0, 5), (8, 13), (16, 20)]
    assert table.visible(0, 9).tolist() == [True] * 5 + [False] * 3 + [True]
    seen = [run.seen for run in split_runs(table, 8, 23)]
    assert [[(s.start, min(s.end, 23)) for s in of] for of in seen[:2]] == [
        [(0, 8), (8, 16)],
        [(0, 8), (16, 20)],
    ]
    assert next((a, b) for _, a, b in parse(USUAL, seen_prefix=0).seen_before(3)) == (8, 13)
    for tokens, number in ((USUAL, 8), (USUAL, 9), (USUAL[8:], 0), (USUAL[8:], 1), ([A] * 8, 4)):
        with pytest.raises(MalformedSpansError, match="seen_prefix"):
            parse_segments(tokens, CONFIG, SpanOptions(seen_prefix=number))
    for wrong in (-1, True, 1.0, "1"):
        with pytest.raises(ConfigurationError, match="seen_prefix"):
            SpanOptions(seen_prefix=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "as_kind",
    [
        tuple,
        lambda ids: array("q", ids),
        lambda ids: np.array(ids, dtype=np.int32),
        lambda ids: list(np.array(ids)),
        lambda ids: list(torch.tensor(ids)),
    ],
    ids=["tuple", "array", "numpy", "numpy numbers", "torch numbers"],
)
def test_token_ids_of_any_kind(as_kind: Any) -> None:
    table = parse(as_kind(USUAL))
    assert rows(table) == rows(parse(USUAL))
    assert parse_segments(as_kind([A] * 9), CONFIG, SpanOptions()) is None


def test_padded_behind_nothing() -> None:
    assert rows(parse(USUAL, frame="none", offsets="padded")) == [
        (PREFIX, 0, 8, 0, 0, 0),
        (SPAN, 8, 16, 3, 8, 0),
        (SPAN, 16, 20, 0, 16, 0),
        (DEPENDENT, 20, 23, 0, 20, 20),
    ]


def test_frame_prefix_without_a_prefix_is_no_frame() -> None:
    table = parse(USUAL[8:])
    assert table.num_frame_tokens == 0
    assert [s.cached_position for s in table.segments] == [0, 0, 9]


def test_a_dependent_segment_in_front_is_no_frame() -> None:
    table = parse([PDEP, A, A, A, *USUAL[8:]])
    assert table.num_frame_tokens == 0
    assert [s.cached_position for s in table.segments] == [0, 0, 0, 13]


def test_pads_of_dependent_segments_count_no_position() -> None:
    table = parse([PDEP, A, PAD, PAD, PDEP, A])
    assert rows(table) == [(DEPENDENT, 0, 4, 2, 0, 0), (DEPENDENT, 4, 6, 0, 2, 2)]


def test_lone_span() -> None:
    table = parse([SSEP, A, A, PAD])
    assert rows(table) == [(SPAN, 0, 4, 1, 0, 0)]
    assert table.generated_position == 3
    assert table.cached_positions(2, 7).tolist() == [2, 3, 3, 4, 5]


@given(st.lists(words))
def test_ordinary_prompts_have_no_table(token_ids: list[int]) -> None:
    assert parse_segments(token_ids, CONFIG, SpanOptions()) is None


def test_an_ordinary_prompt_may_hold_the_pad_token() -> None:
    assert parse_segments([A, PAD, A, PAD], CONFIG, SpanOptions()) is None


# ---- what it says of tokens -----------------------------------------------------------------


@given(prompts(), all_options)
def test_segments_cover_the_prompt_as_it_was_put_together(
    drawn: Drawn, options: SpanOptions
) -> None:
    table = drawn.table(options)
    assert [s.num_tokens for s in table.segments] == [len(part) for part in drawn.parts]
    assert [s.num_pads for s in table.segments] == list(drawn.num_pads)
    assert table.segments[0].start == 0
    assert all(a.end == b.start for a, b in zip(table.segments, table.segments[1:], strict=False))
    assert table.num_prompt_tokens == len(drawn.token_ids)
    assert all(s.start % CONFIG.block_size == 0 for s in table.segments)


@given(prompts(), all_options, st.integers(0, 9))
def test_positions_by_definition(drawn: Drawn, options: SpanOptions, num_generated: int) -> None:
    """Token by token: `compact` counts all but pads of spans and dependent segments."""
    table = drawn.table(options)
    frame = table.num_frame_tokens
    logical, cached = [], []
    compact = 0
    for part, pads, segment in zip(drawn.parts, drawn.num_pads, table.segments, strict=True):
        start = len(logical)
        for index in range(len(part)):
            seen = start + index if options.offsets == "padded" else compact + index
            logical.append(seen)
            cached.append(frame + index if segment.kind is SPAN else seen)
        compact += len(part) - pads
    behind = logical[-1] + 1 - table.last.num_pads
    for index in range(num_generated):
        logical.append(behind + index)
        cached.append(behind + index)
    end = len(logical)
    assert table.logical_positions(0, end).tolist() == logical
    assert table.cached_positions(0, end).tolist() == cached


@given(prompts(), all_options)
def test_frame_is_the_prefix_where_asked_for(drawn: Drawn, options: SpanOptions) -> None:
    table = drawn.table(options)
    has_prefix = drawn.parts[0][0] not in (SSEP, PDEP)
    expected = len(drawn.parts[0]) if has_prefix and options.frame == "prefix" else 0
    assert table.num_frame_tokens == expected


@given(prompts(), all_options)
def test_hidden_tokens_are_pads_and_by_choice_markers_of_spans(
    drawn: Drawn, options: SpanOptions
) -> None:
    visible = drawn.table(options).visible(0, len(drawn.token_ids))
    hidden = {PAD} if options.see_markers else {PAD, SSEP}
    seen = len(drawn.parts[0]) if drawn.seen_prefix is None else drawn.seen_prefix
    assert visible.tolist() == [
        token not in hidden and not seen <= index < len(drawn.parts[0])
        for index, token in enumerate(drawn.token_ids)
    ]


@given(prompts(), all_options, st.data())
def test_a_slice_says_what_the_whole_says(
    drawn: Drawn, options: SpanOptions, data: st.DataObject
) -> None:
    table = drawn.table(options)
    total = len(drawn.token_ids) + 5
    start = data.draw(st.integers(0, total))
    end = data.draw(st.integers(start, total))
    for read in (table.cached_positions, table.logical_positions, table.visible):
        np.testing.assert_array_equal(read(start, end), read(0, total)[start:end])


@given(prompts(), all_options)
def test_shift_is_from_cached_to_logical(drawn: Drawn, options: SpanOptions) -> None:
    table = drawn.table(options)
    for segment in table.segments:
        difference = table.logical_positions(segment.start, segment.end) - table.cached_positions(
            segment.start, segment.end
        )
        assert set(difference.tolist()) == {segment.shift}
        assert segment.kind is SPAN or segment.shift == 0


# ---- what it refuses ------------------------------------------------------------------------


@pytest.mark.parametrize("marker", [SSEP, PDEP])
@pytest.mark.parametrize("index", [1, 3, 5, 9, 14, 18, 21, 22])
def test_marker_inside_a_block(marker: int, index: int) -> None:
    token_ids = [*USUAL]
    token_ids[index] = marker
    with pytest.raises(MalformedSpansError, match="inside a block") as caught:
        parse(token_ids)
    assert caught.value.token_index == index


def test_marker_inside_a_block_of_an_otherwise_ordinary_prompt() -> None:
    with pytest.raises(MalformedSpansError, match="inside a block") as caught:
        parse([A, A, SSEP])
    assert caught.value.token_index == 2


@pytest.mark.parametrize("index", [9, 11, 17])
def test_pad_before_the_end_of_a_segment(index: int) -> None:
    token_ids = [*USUAL]
    token_ids[index] = PAD
    with pytest.raises(MalformedSpansError, match="before the end of a segment") as caught:
        parse(token_ids)
    assert caught.value.token_index == index


def test_pad_in_the_prefix() -> None:
    with pytest.raises(MalformedSpansError, match="prefix") as caught:
        parse([A, A, A, PAD, SSEP, A, A, A, PDEP])
    assert caught.value.token_index == 3


def test_pads_at_the_end_of_the_prompt() -> None:
    with pytest.raises(MalformedSpansError, match="ends in pad") as caught:
        parse([*USUAL, PAD])
    assert caught.value.token_index == 23


@given(prompts(min_segments=2), all_options)
def test_prompt_of_several_segments_that_ends_in_a_span(drawn: Drawn, options: SpanOptions) -> None:
    token_ids = drawn.token_ids
    token_ids += [A] * (-len(token_ids) % CONFIG.block_size)
    with pytest.raises(MalformedSpansError, match="ends in a span") as caught:
        parse_segments([*token_ids, SSEP, A], CONFIG, options)
    assert caught.value.token_index == len(token_ids)


@pytest.mark.parametrize("token_ids", [[SSEP, A], [A] * 4 + [SSEP, A], [SSEP, A, A, A]])
@pytest.mark.parametrize("question", [[], [PDEP, A]])
def test_a_whole_block_of_pads(token_ids: list[int], question: list[int]) -> None:
    """Nobody computes it, so nobody may find it in the cache."""
    pads = [PAD] * (-len(token_ids) % 4 + 4)
    with pytest.raises(MalformedSpansError, match="whole block of pad") as caught:
        parse([*token_ids, *pads, *question])
    assert caught.value.token_index == len(token_ids)


def test_more_dependent_segments_than_a_step_can_look_through() -> None:
    parse([SSEP, A, A, A] * 20_000 + [PDEP, A])
    with pytest.raises(MalformedSpansError, match="too many"):
        parse([SSEP, A, A, A] + [PDEP, A, A, A] * 2000)


def test_many_patches_are_read_in_a_breath() -> None:
    """One by one against all others, these would take seconds."""
    blocks = 1000
    token_ids = [SSEP, *[A] * (8 * blocks - 1), *[A] * (4 * blocks), PDEP, A]
    patches = tuple(Patch(8 * blocks + 4 * i, 8 * i, 8 * i + 4) for i in range(blocks))
    assert len(parse(token_ids, patches=patches).segments) == blocks + 2
    last = Patch(8 * blocks + 4 * (blocks - 1), 8, 12)
    with pytest.raises(MalformedSpansError, match="another one does"):
        parse(token_ids, patches=(*patches[:-1], last))


def test_tokens_behind_a_lone_span_are_steady_from_the_first_generated_one() -> None:
    """Its own tokens see the span alone; those behind it also each other."""
    lone = parse([SSEP, A, A, A, A])
    assert lone.steady_from == 5
    assert parse(USUAL).steady_from == 20


def test_from_where_on_all_is_dependent() -> None:
    assert parse(USUAL).dependent_from == 20
    assert parse([SSEP, A, A, A, A]).dependent_from == 5
    two = [*[A] * 4, SSEP, A, A, A, PDEP, A, A, A, PDEP, A]
    assert parse(two).dependent_from == 8
    between = [*[A] * 4, PDEP, A, A, A, SSEP, A, A, A, PDEP, A]
    assert parse(between).dependent_from == 12


@given(prompts(), all_options, st.data())
def test_any_marker_put_inside_a_block_is_refused_there(
    drawn: Drawn, options: SpanOptions, data: st.DataObject
) -> None:
    token_ids = drawn.token_ids
    inside = [i for i in range(len(token_ids)) if i % CONFIG.block_size]
    if not inside:
        return
    index = data.draw(st.sampled_from(inside))
    token_ids[index] = data.draw(st.sampled_from([SSEP, PDEP]))
    with pytest.raises(MalformedSpansError) as caught:
        parse_segments(token_ids, CONFIG, options)
    assert caught.value.token_index == index


@given(st.lists(st.sampled_from([SSEP, PDEP, PAD, A, B]), min_size=1, max_size=24), all_options)
def test_any_tokens_give_a_table_or_an_error_within_the_prompt(
    token_ids: list[int], options: SpanOptions
) -> None:
    error = None
    try:
        table = parse_segments(token_ids, CONFIG, options)
    except MalformedSpansError as caught:
        error = caught
    if error is not None:
        assert 0 <= error.token_index < len(token_ids)
    elif table is None:
        assert not {SSEP, PDEP} & set(token_ids)
    else:
        assert table.segments[-1].end == len(token_ids)
