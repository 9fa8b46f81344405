"""The attention backend of the CPU platform.

Context rows (ordinary requests, prefixes, spans behind their frame) go through vLLM's own C++
kernel as sequences of a batch that vLLM never saw; dependent rows through `gathered_attention`.
A batch without spans is left to vLLM's backend untouched. Under `unrotated` every row is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from minipic_backend.attention.batch import BatchRows, ContextRow, DependentRow, split_batch
from minipic_backend.attention.gathered import GatheredRow, gathered_attention
from minipic_backend.attention.kv_layout import BlockLayout, probe_layout
from minipic_backend.attention.rotation import RotaryTable
from minipic_backend.plugin.enable import span_config
from minipic_backend.segments import SegmentTable

__all__ = ["BatchSegments", "SpanCPUBackend", "SpanCPUImpl", "SpanCPUMetadataBuilder"]


@dataclass(frozen=True, slots=True)
class BatchSegments:
    """What the runner knows of a batch's requests, in batch order; handed to the builder."""

    tables: Sequence[SegmentTable | None]
    num_computed: Sequence[int]
    num_scheduled: Sequence[int]

    @property
    def has_spans(self) -> bool:
        return any(table is not None for table in self.tables)


@dataclass
class SpanCPUMetadata(CPUAttentionMetadata):
    """vLLM's metadata, over the context rows only, and the rows that are gathered.

    Args:
        context_queries: indices of the context rows' queries in the batch, int64; None where the
            batch has no spans and the metadata is vLLM's own.
        gathered: rows for `gathered_attention`.
    """

    context_queries: torch.Tensor | None = None
    gathered: list[GatheredRow] = field(default_factory=list)


class SpanCPUBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[SpanCPUImpl]:
        return SpanCPUImpl

    @staticmethod
    def get_builder_cls() -> type[SpanCPUMetadataBuilder]:
        return SpanCPUMetadataBuilder


class SpanCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds metadata from vLLM's, and from the segments that the runner left in `batch`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.span_config = span_config(self.vllm_config)
        self.batch: BatchSegments | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SpanCPUMetadata:
        common = common_attn_metadata
        batch = self.batch
        unrotated = self.span_config.key_encoding == "unrotated"
        if batch is None or not (batch.has_spans or unrotated):
            return _widen(super().build(common_prefix_len, common, fast_build))
        rows = split_batch(batch.tables, batch.num_computed, batch.num_scheduled, self.block_size)
        tables = common.block_table_tensor
        gathered = [self._dependent(row, tables, unrotated=unrotated) for row in rows.dependent]
        if unrotated:
            gathered += [self._context(row, tables) for row in rows.context]
            metadata = _widen(_without_rows(common))
            metadata.context_queries = torch.empty(0, dtype=torch.int64)
        else:
            metadata = _widen(super().build(0, self._context_batch(rows, common), fast_build))
            metadata.context_queries = _query_indices(rows)
        metadata.num_actual_tokens = common.num_actual_tokens
        metadata.gathered = gathered
        return metadata

    def _context_batch(
        self, rows: BatchRows, common: CommonAttentionMetadata
    ) -> CommonAttentionMetadata:
        """The context rows as a batch of ordinary sequences."""
        num_queries = [row.num_queries for row in rows.context]
        num_keys = [row.num_keys for row in rows.context]
        width = max((-(-keys // self.block_size) for keys in num_keys), default=1)
        table = torch.zeros((len(rows.context), width), dtype=torch.int32)
        for index, row in enumerate(rows.context):
            ids = _block_ids(common.block_table_tensor, row)
            table[index, : ids.shape[0]] = ids
        start_loc = torch.zeros(len(num_queries) + 1, dtype=torch.int32)
        start_loc[1:] = torch.tensor(num_queries, dtype=torch.int32).cumsum(0)
        return common.replace(
            query_start_loc=start_loc,
            query_start_loc_cpu=start_loc,
            seq_lens=torch.tensor(num_keys, dtype=torch.int32),
            num_reqs=len(num_queries),
            num_actual_tokens=int(start_loc[-1]),
            max_query_len=max(num_queries, default=0),
            max_seq_len=max(num_keys, default=0),
            block_table_tensor=table,
        )

    def _dependent(
        self, row: DependentRow, tables: torch.Tensor, *, unrotated: bool
    ) -> GatheredRow:
        table = row.table
        num_blocks = -(-row.end // self.block_size)
        num_slots = num_blocks * self.block_size
        cached = np.zeros(num_slots, dtype=np.int64)
        logical = np.zeros(num_slots, dtype=np.int64)
        seen = np.zeros(num_slots, dtype=np.bool_)
        cached[: row.end] = table.cached_positions(0, row.end)
        logical[: row.end] = table.logical_positions(0, row.end)
        seen[: row.end] = table.visible(0, row.end)
        shifts = logical if unrotated else logical - cached
        shifts[~seen] = 0
        mask = _causal_mask(np.arange(row.start, row.end), num_slots)
        mask[:, ~seen] = -np.inf
        return GatheredRow(
            query_start=row.query_start,
            num_queries=row.num_queries,
            block_ids=tables[row.request, :num_blocks].long(),
            shifts=torch.from_numpy(shifts) if shifts.any() else None,
            query_shifts=torch.from_numpy(logical[row.start : row.end]) if unrotated else None,
            mask=torch.from_numpy(mask),
        )

    def _context(self, row: ContextRow, tables: torch.Tensor) -> GatheredRow:
        block_ids = _block_ids(tables, row).long()
        num_slots = block_ids.shape[0] * self.block_size
        queries = np.arange(row.num_keys - row.num_queries, row.num_keys)
        return GatheredRow(
            query_start=row.query_start,
            num_queries=row.num_queries,
            block_ids=block_ids,
            shifts=torch.arange(num_slots).clamp_(max=row.num_keys - 1),
            query_shifts=torch.from_numpy(queries),
            mask=torch.from_numpy(_causal_mask(queries, num_slots)),
        )


class SpanCPUImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, and `gathered_attention` for rows that its kernel cannot serve.

    `rotary` is set by the runner once the model is loaded.
    """

    rotary: RotaryTable | None = None
    _layout: BlockLayout | None = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        metadata = attn_metadata
        if not isinstance(metadata, SpanCPUMetadata) or metadata.context_queries is None:
            return super().forward(  # type: ignore[no-any-return]
                layer,
                query,
                key,
                value,
                kv_cache,
                metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantization with spans")
        num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
        # As vLLM's own forward splits a block: keys, then values.
        halves = kv_cache.view(num_blocks, num_kv_heads, 2 * block_size, -1)
        key_cache, value_cache = halves.chunk(2, dim=2)
        if metadata.context_queries.numel():
            self._context_rows(
                metadata.context_queries, layer, query, key_cache, value_cache, metadata, output
            )
        if self._layout is None:
            self._layout = self._probe(layer, kv_cache)
        assert self.rotary is not None
        for row in metadata.gathered:
            stop = row.query_start + row.num_queries
            output[row.query_start : stop] = gathered_attention(
                query[row.query_start : stop],
                key_cache,
                value_cache,
                row,
                self._layout,
                self.rotary,
                self.scale,
                self.logits_soft_cap,
            ).to(output.dtype)
        return output

    def _context_rows(
        self,
        context_queries: torch.Tensor,
        layer: Any,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: SpanCPUMetadata,
        output: torch.Tensor,
    ) -> None:
        queries = query.index_select(0, context_queries)
        out = torch.empty_like(queries)
        ops.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=key_cache,
            value_cache=value_cache,
            output=out,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=self.sliding_window,
            block_table=metadata.block_table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=metadata.scheduler_metadata,
            s_aux=None,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        output.index_copy_(0, context_queries, out)

    def _probe(self, layer: Any, kv_cache: torch.Tensor) -> BlockLayout:
        """The kernel's packing, read off a block written beside the real cache."""
        _, num_kv_heads, block_size, width = kv_cache.shape
        head_size = width // 2
        scratch = torch.zeros((2, num_kv_heads, block_size, width), dtype=kv_cache.dtype)
        slots = torch.arange(block_size, dtype=torch.int64) + block_size

        def write(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            one = numbers[:, None].expand(-1, num_kv_heads, -1).to(kv_cache.dtype).contiguous()
            self.do_kv_cache_update(layer, one, one, scratch, slots)
            halves = scratch.view(2, num_kv_heads, 2 * block_size, head_size)[1, 0]
            return halves[:block_size].flatten(), halves[block_size:].flatten()

        return probe_layout(write, block_size, head_size)


def _widen(metadata: CPUAttentionMetadata) -> SpanCPUMetadata:
    own = {item.name: getattr(metadata, item.name) for item in fields(CPUAttentionMetadata)}
    return SpanCPUMetadata(**own)


def _without_rows(common: CommonAttentionMetadata) -> CPUAttentionMetadata:
    return CPUAttentionMetadata(
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=common.max_query_len,
        query_start_loc=common.query_start_loc,
        max_seq_len=common.max_seq_len,
        seq_lens=common.seq_lens,
        block_table=common.block_table_tensor,
        slot_mapping=common.slot_mapping,
        scheduler_metadata=None,
    )


def _block_ids(tables: torch.Tensor, row: ContextRow) -> torch.Tensor:
    return torch.cat([tables[row.request, lo:hi] for lo, hi in row.blocks])


def _query_indices(rows: BatchRows) -> torch.Tensor:
    pieces = [
        torch.arange(row.query_start, row.query_start + row.num_queries) for row in rows.context
    ]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)


def _causal_mask(queries: np.ndarray[Any, Any], num_slots: int) -> np.ndarray[Any, Any]:
    """float32 [num_queries, num_slots]: 0 where slot <= query, else -inf."""
    hidden = np.arange(num_slots)[None, :] > queries[:, None]
    return np.where(hidden, np.float32(-np.inf), np.float32(0.0))
