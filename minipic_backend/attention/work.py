"""How attention is shared out among thread blocks: once per step, for all layers, on the device.

    item    up to `block_q` queries of one row, and the keys [begin, end) that they see
    worker  one thread block per KV head; all items, end to end, are one line of keys, of which
            every worker gets an equal share
    piece   what a worker has of one item

so that the grid depends on the GPU alone (CUDA graphs), no worker waits for a longer one, and
neither segments nor requests need to be of like length. An item cut among workers is merged by
`merge`; one that is not is final. A worker's pieces lie at `item + worker`: both only grow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minipic_backend.attention.geometry import next_power_of_2
from minipic_backend.attention.kernels.work import (
    ITEM_FIELDS,
    PIECE_FIELDS,
    WORKER_FIELDS,
    items_kernel,
    pieces_kernel,
)
from minipic_backend.attention.rows import QueryRows, RowSegments

__all__ = ["WorkPlan", "bucket_sizes", "plan_work"]


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """Shared-out work; fixed shapes for fixed arguments of `allocate`. All tensors int32.

    Args:
        items: [max_items, ITEM_FIELDS].
        pieces: [max_items + num_workers, PIECE_FIELDS].
        workers: [num_workers, WORKER_FIELDS].
        block_q: queries in an item, at most.
        block_n: keys in a tile.
        window: of the layers that this plan is for; 0 is none.
    """

    items: Tensor
    pieces: Tensor
    workers: Tensor
    block_q: int
    block_n: int
    window: int = 0

    @classmethod
    def allocate(
        cls,
        max_rows: int,
        max_tokens: int,
        num_workers: int,
        block_q: int,
        block_n: int,
        window: int = 0,
        device: torch.device | str = "cpu",
    ) -> WorkPlan:
        """Room for any batch of `max_rows` rows and `max_tokens` queries."""
        max_items = _max_items(max_rows, max_tokens, block_q)
        shapes = (
            (max_items, ITEM_FIELDS.value),
            (max_items + num_workers, PIECE_FIELDS.value),
            (num_workers, WORKER_FIELDS.value),
        )
        items, pieces, workers = (
            torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes
        )
        return cls(items, pieces, workers, block_q, block_n, window)

    def narrowed(self, max_rows: int, max_tokens: int) -> WorkPlan:
        """The beginning of these buffers, as a plan for smaller batches."""
        max_items = _max_items(max_rows, max_tokens, self.block_q)
        return replace(
            self, items=self.items[:max_items], pieces=self.pieces[: max_items + self.num_workers]
        )

    @property
    def num_workers(self) -> int:
        return int(self.workers.shape[0])


def plan_work(
    plan: WorkPlan,
    rows: QueryRows,
    segments: RowSegments,
    min_share: int = 256,
) -> WorkPlan:
    """Fills `plan` for a batch; two small launches, no synchronization.

    Args:
        plan: written in place.
        rows: of the batch.
        segments: of the rows.
        min_share: keys below which it does not pay to cut an item.
    """
    max_items = plan.items.shape[0]
    if _max_items(rows.num_rows, rows.num_tokens, plan.block_q) > max_items:
        raise ValueError(f"A plan of {max_items} items is too small for {rows.num_tokens} queries")
    if max_items == 0:
        return plan
    num_warps = 4
    items_kernel[(max_items,)](
        plan.items,
        rows.query_start,
        rows.query_end,
        rows.seq_lens,
        segments.first,
        segments.last,
        segments.start,
        segments.end,
        segments.base,
        rows.num_rows,
        plan.window,
        plan.block_q,
        BLOCK_ROWS=_bucket(rows.num_rows),
        BLOCK_SEGMENTS=128,
        num_warps=num_warps,
    )
    pieces_kernel[(plan.num_workers,)](
        plan.items,
        plan.pieces,
        plan.workers,
        segments.first,
        segments.last,
        segments.start,
        segments.end,
        max_items,
        plan.num_workers,
        min_share,
        plan.block_n,
        BLOCK_ITEMS=_bucket(max_items),
        BLOCK_SEGMENTS=128,
        num_warps=num_warps,
    )
    return plan


def bucket_sizes(largest: int) -> list[int]:
    """One number of rows or items, up to `largest`, for each size that kernels are compiled for."""
    sizes = []
    size = _bucket(1)
    while size < largest:
        sizes.append(size)
        size = _bucket(size + 1)
    return [*sizes, largest]


def _max_items(max_rows: int, max_tokens: int, block_q: int) -> int:
    return min(max_rows + max_tokens // block_q, max_tokens)


def _bucket(n: int) -> int:
    """The least of 64, 256, 1024, … that holds n: few sizes, as each is compiled."""
    bits = max(next_power_of_2(n).bit_length() - 1, 6)
    return 1 << (bits + bits % 2)
