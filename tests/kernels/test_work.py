"""Every key of every item is some worker's, once; shares are even."""

from __future__ import annotations

import pytest
import torch

from minipic_backend.attention.rows import OPEN_END, QueryRows, RowSegments, SeenSegment
from minipic_backend.attention.work import WorkPlan, plan_work


def plan_of(device, lengths, seq_lens, seen, num_workers, block_q=2, block_n=16, window=0):
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    rows = QueryRows(
        starts[:-1].to(device),
        starts[1:].to(device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        torch.zeros(len(lengths), 1, dtype=torch.int32, device=device),
        max(lengths),
        sum(lengths),
    )
    plan = WorkPlan.allocate(
        len(lengths), sum(lengths), num_workers, block_q, block_n, window, device
    )
    return plan_work(plan, rows, RowSegments.pack(seen, device), min_share=block_n)


@pytest.mark.parametrize("num_workers", [1, 3, 8])
def test_pieces_cover_all_keys_once(device, num_workers):
    lengths, seq_lens = [1, 0, 5, 1], [70, 0, 33, 16]
    seen = [
        [SeenSegment(0, 20, 0, 0), SeenSegment(32, 32, 1, 0), SeenSegment(32, OPEN_END, 2, -4)],
        [SeenSegment(0, OPEN_END, 0, 0)],
        [SeenSegment(0, OPEN_END, 0, 7)],
        [SeenSegment(0, OPEN_END, 0, 0)],
    ]
    plan = plan_of(device, lengths, seq_lens, seen, num_workers)
    items = plan.items.tolist()
    used = [(row, query, n, index, base) for row, query, n, index, _, base in items if n > 0]
    assert used == [
        (0, 0, 1, 69, -4), (2, 1, 2, 28, 7), (2, 3, 2, 30, 7), (2, 5, 1, 32, 7), (3, 6, 1, 15, 0),
    ]  # fmt: skip
    covered: dict[int, list[int]] = {}
    segments = [s for row in seen for s in row]
    for worker, (first_item, last_item, *_, share) in enumerate(plan.workers.tolist()):
        keys = 0
        for item in range(first_item, last_item + 1):
            first, last, seg, tiles = plan.pieces[item + worker].tolist()
            covered.setdefault(item, []).extend(range(first, last))
            keys += last - first
            walked = walk(segments, seg, tiles, first, last, block_n=16)
            row_seen = seen[items[item][0]]
            assert walked == [
                j for s in row_seen for j in range(max(s.start, first), min(s.end, last))
            ]
        assert keys <= share
    assert covered == {
        i: list(range(index + n)) for i, (_, _, n, index, _, _) in enumerate(items) if n > 0
    }


def walk(segments, seg, num_tiles, first, last, block_n):
    """The keys that a kernel meets: its loop over tiles, in plain Python."""
    keys = []
    pos = max(segments[seg].start, first)
    stop = min(segments[seg].end, last)
    for _ in range(num_tiles):
        keys += [n for n in range(pos, pos + block_n) if n < stop]
        pos += block_n
        if pos >= stop:
            seg = min(seg + 1, len(segments) - 1)
            pos = max(segments[seg].start, first)
        stop = min(segments[seg].end, last)
    return keys


def test_more_segments_than_a_scan_holds(device):
    seen = [[SeenSegment(16 * i, 16 * i + 5, 0, 0) for i in range(150)]]
    seen[0].append(SeenSegment(16 * 150, OPEN_END, 0, 0))
    plan = plan_of(device, [1], [16 * 150 + 1], seen, num_workers=2)
    (_, _, seg0, tiles0), (first, _, seg1, tiles1) = plan.pieces[:2].tolist()
    assert (seg0, tiles0 + tiles1) == (0, 151 + (first % 16 < 5 and first % 16 > 0))
    assert seg1 == sum(s.end <= first for s in seen[0])


def test_windows_begin_at_the_first_visible_key(device):
    seen = [[SeenSegment(0, 10, 5, 0), SeenSegment(16, OPEN_END, 0, -6)]]
    plan = plan_of(
        device,
        [2],
        [
            30,
        ],
        seen,
        num_workers=1,
        window=16,
    )
    # The first query stands at 28 - 6 = 22 and sees positions from 7 on.
    assert plan.items[0].tolist() == [0, 0, 2, 28, 7, -6]


def test_a_plan_that_is_too_small_is_refused(device):
    start, end = torch.tensor([0], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    rows = QueryRows(start, end, end, torch.zeros(1, 1, dtype=torch.int32), 9, 9)
    segments = RowSegments.pack([[SeenSegment(0, OPEN_END, 0, 0)]])
    with pytest.raises(ValueError, match="too small"):
        plan_work(WorkPlan.allocate(1, 4, 1, 2, 16), rows, segments)
