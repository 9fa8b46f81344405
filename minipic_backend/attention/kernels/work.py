# mypy: ignore-errors
# Reason: Triton kernels are not typed Python.
"""Kernels of `attention.work`.

Here and in the other kernels, numbers and addresses that change from batch to batch are not
specialized on: a server must not stop to compile. Block sizes of the kernels that are planned for
are ordinary numbers here: one compilation serves them all.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["ITEM_FIELDS", "PIECE_FIELDS", "WORKER_FIELDS", "items_kernel", "pieces_kernel"]

# row, first query in the batch, num queries, token index of the first, begin, position - index
ITEM_FIELDS = tl.constexpr(6)
# first and last token, first segment, number of key tiles
PIECE_FIELDS = tl.constexpr(4)
# first and last item, where the first one starts and stops on the line, share
WORKER_FIELDS = tl.constexpr(5)


@triton.jit(
    do_not_specialize=["num_rows", "window", "block_q"],
    do_not_specialize_on_alignment=[
        "items_ptr",
        "query_start_ptr",
        "query_end_ptr",
        "seq_lens_ptr",
        "seg_first_ptr",
        "seg_last_ptr",
        "seg_start_ptr",
        "seg_end_ptr",
        "seg_base_ptr",
    ],
)
def items_kernel(
    items_ptr,
    query_start_ptr,
    query_end_ptr,
    seq_lens_ptr,
    seg_first_ptr,
    seg_last_ptr,
    seg_start_ptr,
    seg_end_ptr,
    seg_base_ptr,
    num_rows,
    window,
    block_q,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
):
    """One program per item."""
    item = tl.program_id(0)
    # [BLOCK_ROWS]
    r = tl.arange(0, BLOCK_ROWS)
    row_mask = r < num_rows
    lengths = tl.load(query_end_ptr + r, mask=row_mask, other=0)
    lengths -= tl.load(query_start_ptr + r, mask=row_mask, other=0)
    tiles = tl.cdiv(lengths, block_q)
    row = tl.sum((row_mask & (tl.cumsum(tiles, 0) <= item)).to(tl.int32))
    is_used = row < num_rows
    row = tl.minimum(row, num_rows - 1)
    first = (item - tl.sum(tl.where(r < row, tiles, 0))) * block_q
    query_start = tl.load(query_start_ptr + row)
    length = tl.load(query_end_ptr + row) - query_start
    num_queries = tl.where(is_used, tl.minimum(length - first, block_q), 0)
    index = tl.load(seq_lens_ptr + row) - length + first
    # Queries stand in the last segment that they see.
    seg_last = tl.load(seg_last_ptr + row)
    query_base = tl.load(seg_base_ptr + tl.maximum(seg_last - 1, 0))

    begin = 0
    if window > 0:
        # Key n is seen by the first query, at position t, iff t - (n + base) < window.
        t = index + query_base
        begin = index
        for seg in range(tl.load(seg_first_ptr + row), seg_last, BLOCK_SEGMENTS):
            s = seg + tl.arange(0, BLOCK_SEGMENTS)
            mask = s < seg_last
            start = tl.load(seg_start_ptr + s, mask=mask, other=0)
            lowest = t - window + 1 - tl.load(seg_base_ptr + s, mask=mask, other=0)
            lowest = tl.maximum(lowest, start)
            is_seen = lowest < tl.load(seg_end_ptr + s, mask=mask, other=0)
            begin = tl.minimum(begin, tl.min(tl.where(is_seen, lowest, begin)))
    record = items_ptr + item * ITEM_FIELDS
    tl.store(record, row)
    tl.store(record + 1, query_start + first)
    tl.store(record + 2, num_queries)
    tl.store(record + 3, index)
    tl.store(record + 4, begin)
    tl.store(record + 5, query_base)


@triton.jit(
    do_not_specialize=["max_items", "num_workers", "min_share", "block_n"],
    do_not_specialize_on_alignment=[
        "items_ptr",
        "pieces_ptr",
        "workers_ptr",
        "seg_first_ptr",
        "seg_last_ptr",
        "seg_start_ptr",
        "seg_end_ptr",
    ],
)
def pieces_kernel(
    items_ptr,
    pieces_ptr,
    workers_ptr,
    seg_first_ptr,
    seg_last_ptr,
    seg_start_ptr,
    seg_end_ptr,
    max_items,
    num_workers,
    min_share,
    block_n,
    BLOCK_ITEMS: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
):
    """One program per worker."""
    worker = tl.program_id(0)
    # [BLOCK_ITEMS]
    i = tl.arange(0, BLOCK_ITEMS)
    record = items_ptr + i * ITEM_FIELDS
    mask = i < max_items
    num_queries = tl.load(record + 2, mask=mask, other=0)
    end = tl.load(record + 3, mask=mask, other=0) + num_queries
    work = tl.where(num_queries > 0, end - tl.load(record + 4, mask=mask, other=0), 0)
    line = tl.cumsum(work, 0)
    total = tl.sum(work)
    share = tl.maximum(tl.cdiv(total, num_workers), min_share)
    share = tl.cdiv(share, block_n) * block_n
    lo = worker * share
    hi = tl.minimum(lo + share, total)
    first_item = tl.sum((line <= lo).to(tl.int32))
    last_item = tl.sum((line < hi).to(tl.int32))
    if lo >= total:
        first_item = 0
        last_item = -1
    record = workers_ptr + worker * WORKER_FIELDS
    tl.store(record, first_item)
    tl.store(record + 1, last_item)
    tl.store(record + 2, tl.sum(tl.where(i < first_item, work, 0)))
    tl.store(record + 3, tl.sum(tl.where(i <= first_item, work, 0)))
    tl.store(record + 4, share)

    for item in range(first_item, last_item + 1):
        on_line = tl.sum(tl.where(i < item, work, 0))
        record = items_ptr + item * ITEM_FIELDS
        row = tl.load(record)
        item_end = tl.load(record + 3) + tl.load(record + 2)
        begin = tl.load(record + 4)
        first = begin + tl.maximum(lo - on_line, 0)
        last = tl.minimum(begin + hi - on_line, item_end)
        seg_first = tl.load(seg_first_ptr + row)
        seg_last = tl.load(seg_last_ptr + row)
        seg = seg_first
        num_tiles = 0
        for chunk in range(seg_first, seg_last, BLOCK_SEGMENTS):
            # [BLOCK_SEGMENTS]
            s = chunk + tl.arange(0, BLOCK_SEGMENTS)
            seg_mask = s < seg_last
            start = tl.load(seg_start_ptr + s, mask=seg_mask, other=0)
            stop = tl.load(seg_end_ptr + s, mask=seg_mask, other=0)
            seg += tl.sum((seg_mask & (stop <= first)).to(tl.int32))
            # An empty segment between others costs a tile without keys.
            is_in = seg_mask & (stop > first) & (start < last)
            num_keys = tl.minimum(stop, last) - tl.maximum(start, first)
            num_tiles += tl.sum(tl.where(is_in, tl.maximum(tl.cdiv(num_keys, block_n), 1), 0))
        record = pieces_ptr + (item + worker) * PIECE_FIELDS
        tl.store(record, first)
        tl.store(record + 1, last)
        tl.store(record + 2, tl.maximum(tl.minimum(seg, seg_last - 1), 0))
        tl.store(record + 3, num_tiles)
