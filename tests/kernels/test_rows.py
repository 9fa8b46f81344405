"""Rows against the segment table: whom a token sees, at which position."""

from __future__ import annotations

import pytest
import torch
from cases import make_table

from minipic_backend.attention.naive import visibility
from minipic_backend.attention.rows import RowSegments, split_runs
from minipic_backend.spans.segments import SegmentKind


@pytest.mark.parametrize("frame", ["none", "prefix"])
@pytest.mark.parametrize("offsets", ["compact", "padded"])
@pytest.mark.parametrize("see_markers", [True, False])
@pytest.mark.parametrize("shape", [(9, [7, 4, 1], 3), (0, [5, 4], 2), (0, [6], 0), (5, [], 3)])
def test_runs_say_what_the_table_says(frame, offsets, see_markers, shape):
    table = make_table(*shape, 4, frame=frame, offsets=offsets, see_markers=see_markers)
    end = table.num_prompt_tokens + 3
    seen = torch.zeros(end, end, dtype=torch.bool)
    cached = table.cached_positions(0, end)
    logical = table.logical_positions(0, end)
    runs = split_runs(table, 0, end)
    assert [run.start for run in runs[1:]] == [run.end for run in runs[:-1]]
    assert (runs[0].start, runs[-1].end) == (0, end)
    for run in runs:
        positions = cached if run.kind is SegmentKind.SPAN else logical
        own = run.seen[-1]
        for i in range(run.start, run.end):
            assert i + own.base == cached[i]
            for s in run.seen:
                for j in range(s.start, min(s.end, i + 1)):
                    seen[i, j] = True
                    assert (j + s.base, s.shift) == (positions[j], positions[j] - cached[j])
    assert torch.equal(seen, visibility(table, 0, end))


def test_chunks_are_cuts_of_the_same_runs():
    table = make_table(9, [7, 4], 3, 4)
    whole = split_runs(table, 0, table.num_prompt_tokens)
    parts = split_runs(table, 0, 14) + split_runs(table, 14, table.num_prompt_tokens)
    assert sum(run.num_tokens for run in parts) == sum(run.num_tokens for run in whole)
    assert {run.seen for run in parts} == {run.seen for run in whole}


def test_packing():
    table = make_table(0, [5], 2, 4)
    rows = [run.seen for run in split_runs(table, 0, table.num_prompt_tokens)]
    packed = RowSegments.pack([rows[1], rows[0]])
    assert packed.first.tolist() == [0, 2]
    assert packed.last.tolist() == [2, 3]
    assert packed.start.tolist() == [0, 8, 0]
    assert packed.end.tolist()[0] == 5
    assert packed.shift.dtype is torch.int32
