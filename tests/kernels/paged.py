"""Runs a paged kernel on a batch of `cases`."""

from __future__ import annotations

import torch
from cases import Batch
from torch import Tensor

from minipic_backend.attention.geometry import Geometry
from minipic_backend.attention.span_local import span_local_attention
from minipic_backend.attention.unrotated import unrotated_attention
from minipic_backend.attention.work import WorkPlan, plan_work


def run_paged(
    batch: Batch,
    *,
    scale: float = 0.25,
    soft_cap: float = 0.0,
    window: int = 0,
    block_m: int = 16,
    block_n: int = 16,
    num_workers: int = 3,
    min_share: int = 16,
    spans: bool = True,
) -> Tensor:
    """Output of the kernel of the batch's encoding; NaN where no row has a query."""
    rows, segments = batch.rows(spans)
    group = batch.heads.num_heads // batch.heads.num_kv_heads
    plan = WorkPlan.allocate(
        rows.num_rows, rows.num_tokens, num_workers, block_m // group, block_n, window, batch.device
    )
    for tensor in (plan.items, plan.pieces, plan.workers):
        tensor.fill_(-(2**20))  # whatever an earlier, larger batch left
    plan_work(plan, rows, segments, min_share)
    kernel = unrotated_attention if batch.encoding == "unrotated" else span_local_attention
    kernel(
        batch.query, batch.key_cache, batch.value_cache, rows, segments, plan, batch.rotary,
        batch.out, scale=scale, soft_cap=soft_cap, q_scale=batch.q_scale, k_scale=batch.k_scale,
        v_scale=batch.v_scale, geometry=Geometry(block_m, block_n, num_warps=4, num_stages=2),
    )  # fmt: skip
    return batch.out


def max_error(out: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; NaN counts as infinite."""
    return float((out.double().cpu() - expected).abs().nan_to_num(torch.inf).max())


def relative_error(out: Tensor, expected: Tensor) -> float:
    """|out - expected| / |expected|, Euclidean norms; NaN counts as infinite."""
    difference = (out.double().cpu() - expected).norm() / expected.norm()
    return float(difference.nan_to_num(torch.inf))
