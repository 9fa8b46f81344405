"""The attention backend of the CPU platform.

Context runs (ordinary requests, prefixes, spans behind their frame) go through vLLM's own C++
kernel as sequences of a batch that vLLM never saw; dependent runs through `gathered_attention`.
A batch without spans is left to vLLM's backend untouched. Under `unrotated` every run is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from minipic_backend.attention.gathered import (
    GatheredRun,
    Scratch,
    gather_run,
    gathered_attention,
)
from minipic_backend.attention.kv_layout import BlockLayout, probe_layout
from minipic_backend.attention.rotary import Rotary
from minipic_backend.attention.rows import PlacedRun, split_runs
from minipic_backend.attention.sequences import context_sequences
from minipic_backend.plugin.enable import span_config
from minipic_backend.spans.segments import SegmentKind, SegmentTable

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
    """vLLM's metadata, over the context runs only, and the runs that are gathered.

    Args:
        context_queries: indices of the context runs' queries in the batch, int64; None where the
            batch has no spans and the metadata is vLLM's own.
        gathered: runs for `gathered_attention`.
    """

    context_queries: torch.Tensor | None = None
    gathered: list[GatheredRun] = field(default_factory=list)


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
        self.scratch = Scratch()

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
        context: list[PlacedRun] = []
        gathered: list[PlacedRun] = []
        for placed in _placed_runs(batch):
            is_context = placed.run.kind is not SegmentKind.DEPENDENT and not unrotated
            (context if is_context else gathered).append(placed)
        if context:
            metadata = _widen(super().build(0, self._context_batch(context, common), fast_build))
        else:
            metadata = _widen(_without_rows(common))
        queries = [torch.arange(p.query, p.query + p.run.num_tokens) for p in context]
        metadata.context_queries = torch.cat([torch.empty(0, dtype=torch.int64), *queries])
        metadata.num_actual_tokens = common.num_actual_tokens
        metadata.gathered = [
            gather_run(
                placed,
                common.block_table_tensor,
                self.block_size,
                unrotated=unrotated,
                scratch=self.scratch,
            )
            for placed in gathered
        ]
        return metadata

    def _context_batch(
        self, context: list[PlacedRun], common: CommonAttentionMetadata
    ) -> CommonAttentionMetadata:
        """The context runs as a batch of ordinary sequences."""
        sequences = context_sequences(context, common.block_table_tensor, self.block_size)
        return common.replace(
            query_start_loc=sequences.cu_seqlens_q,
            query_start_loc_cpu=sequences.cu_seqlens_q,
            seq_lens=sequences.seqused_k,
            num_reqs=len(context),
            num_actual_tokens=int(sequences.cu_seqlens_q[-1]),
            max_query_len=sequences.max_seqlen_q,
            max_seq_len=sequences.max_seqlen_k,
            block_table_tensor=sequences.block_table,
        )


class SpanCPUImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, and `gathered_attention` for runs that its kernel cannot serve.

    `rotary` is set by the runner once the model is loaded.
    """

    rotary: Rotary | None = None
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
        for run in metadata.gathered:
            stop = run.query + run.num_queries
            output[run.query : stop] = gathered_attention(
                query[run.query : stop],
                key_cache,
                value_cache,
                run,
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


def _placed_runs(batch: BatchSegments) -> Iterator[PlacedRun]:
    """Every run of a batch, in the order of its tokens."""
    query = 0
    for request, (table, start, count) in enumerate(
        zip(batch.tables, batch.num_computed, batch.num_scheduled, strict=True)
    ):
        for run in split_runs(table, start, start + count):
            yield PlacedRun(request, query, run)
            query += run.num_tokens
