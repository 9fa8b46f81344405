"""Shapes of `kernels.py`: an 8B Llama's attention layer, over documents of 1,000 or 121 tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minipic_backend.attention.geometry import AttentionShape
from minipic_backend.attention.rotary import Rotary, cos_sin_table
from minipic_backend.attention.rows import PlacedRun, Run, split_runs
from minipic_backend.config import SpanConfig, SpanOptions
from minipic_backend.spans.segments import SegmentTable, parse_segments

__all__ = ["CASES", "LLAMA_8B", "TINY", "TINY_CASES", "Case", "Inputs"]

LLAMA_8B = AttentionShape(num_heads=32, num_kv_heads=8, head_size=128, block_size=16)
TINY = AttentionShape(num_heads=2, num_kv_heads=1, head_size=32, block_size=16, itemsize=4)


@dataclass(frozen=True)
class Case:
    """A batch of equal requests.

    Args:
        name: as printed.
        num_requests: requests.
        num_documents: spans in each, behind a prefix of two blocks.
        document: tokens of a span, before padding.
        num_queries: tokens of the question that are computed; 1 is a decode behind a question of
            16 tokens.
    """

    name: str
    num_requests: int
    num_documents: int
    document: int
    num_queries: int


CASES = (
    Case("decode 32x8k", 32, 8, 1000, 1),
    Case("decode 64x2k, documents of 121", 64, 16, 121, 1),
    Case("decode 1x8k", 1, 8, 1000, 1),
    Case("decode 1x100k, 100 documents", 1, 100, 1000, 1),
    Case("question of 50, 1x10k", 1, 10, 1000, 50),
    Case("question of 50, 1x100k", 1, 100, 1000, 50),
    Case("question of 50, 16x1.2k, documents of 121", 16, 10, 121, 50),
    Case("turn of 2048 after 10k", 1, 10, 1000, 2048),
)
TINY_CASES = (
    Case("decode", 2, 2, 20, 1),
    Case("question", 2, 2, 20, 9),
)


class Inputs:
    """Random queries and caches of `num_layers` layers for a case.

    Attributes:
        table: segments of each request.
        run: the run of each request's queries.
        runs: those runs, placed in the batch.
        plain: the same queries, as if the prompt were ordinary.
        num_tokens: cached tokens of each request, queries included.
        kv_bytes: bytes of keys and values that must be read.
        flops: operations of the two products, nothing padded.
    """

    def __init__(
        self, case: Case, shape: AttentionShape, device: str, min_bytes: int, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(0)
        self.case, self.shape, self.device = case, shape, device
        self.table = _table(case, shape.block_size)
        self.num_tokens = self.table.num_prompt_tokens + (case.num_queries == 1)
        start = self.num_tokens - case.num_queries
        (self.run,) = split_runs(self.table, start, self.num_tokens)
        (plain,) = split_runs(None, start, self.num_tokens)
        self.runs = self._placed(self.run)
        self.plain = self._placed(plain)
        blocks = -(-self.num_tokens // shape.block_size)
        total = blocks * case.num_requests
        cache_shape = (total, 2, shape.block_size, shape.num_kv_heads, shape.head_size)
        bytes_per_token = 2 * shape.num_kv_heads * shape.head_size * shape.itemsize
        num_layers = max(2, -(-min_bytes // (total * shape.block_size * bytes_per_token)))
        self.caches = [
            torch.randn(cache_shape, dtype=dtype, device=device) for _ in range(num_layers)
        ]
        self.block_table = (
            torch.randperm(total).view(case.num_requests, blocks).to(torch.int32).to(device)
        )
        self.query = 2 * torch.randn(
            case.num_requests * case.num_queries, shape.num_heads, shape.head_size, device=device
        )
        self.query = self.query.to(dtype)
        inv_freq = 500000.0 ** -(torch.arange(0, shape.head_size, 2) / shape.head_size)
        table = cos_sin_table(inv_freq, 131072 if device == "cuda" else 4096)
        self.rotary = Rotary(table.to(device))
        self.scale = shape.head_size**-0.5
        self.kv_bytes = self.num_tokens * case.num_requests * bytes_per_token
        pairs = case.num_queries * (self.num_tokens - (case.num_queries - 1) / 2)
        self.flops = 4 * case.num_requests * pairs * shape.num_heads * shape.head_size

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Key and value cache, [num_blocks, block_size, num_kv_heads, head_size]."""
        cache = self.caches[index % len(self.caches)]
        return cache[:, 0], cache[:, 1]

    def request(self, index: int, layer: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one request's first tokens, in float64."""
        blocks = self.block_table[index].long()
        key, value = (c[blocks].flatten(0, 1)[:num_tokens].double() for c in self.layer(layer))
        return key, value

    def _placed(self, run: Run) -> list[PlacedRun]:
        count = self.case.num_queries
        return [PlacedRun(i, i * count, run) for i in range(self.case.num_requests)]


def _table(case: Case, block_size: int) -> SegmentTable:
    ssep, pdep, pad = 1, 2, 3
    padding = -case.document % block_size
    document = [ssep] + [9] * (case.document - 1) + [pad] * padding
    question = [pdep] + [9] * ((case.num_queries if case.num_queries > 1 else 16) - 1)
    tokens = [9] * (2 * block_size) + document * case.num_documents + question
    table = parse_segments(
        np.asarray(tokens), SpanConfig(ssep, pdep, pad, block_size), SpanOptions()
    )
    assert table is not None
    return table
