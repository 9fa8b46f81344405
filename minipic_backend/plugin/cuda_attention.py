"""The attention backend on CUDA.

A batch without spans is vLLM's FlashAttention, untouched: its metadata is vLLM's own. In a batch
with spans, context runs (ordinary requests, prefixes, spans behind their frame) go through the
same FlashAttention as sequences of a batch that vLLM never saw, and dependent runs through the
kernels of `minipic_backend.attention`. In a FULL CUDA graph, one kernel serves every row.

With an fp8 KV cache, vLLM's layer hands over queries in fp8, too: FlashAttention takes them as they
are, our kernels widen queries, keys and values to the output's dtype and multiply by the scales.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.platforms import current_platform
from vllm.utils.torch_utils import (
    async_tensor_h2d,
    canonicalize_singleton_dim_strides,
    is_quantized_kv_cache,
)
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from minipic_backend.attention.dispatch import (
    SpanWork,
    max_compact_keys,
    plan_dependent,
    run_dependent,
)
from minipic_backend.attention.geometry import AttentionShape
from minipic_backend.attention.rotary import Rotary
from minipic_backend.attention.rows import PlacedRun, Run
from minipic_backend.attention.sequences import context_sequences
from minipic_backend.attention.warmup import warm_up
from minipic_backend.plugin.cuda_graphs import GraphRows
from minipic_backend.plugin.cuda_state import GraphKind, SpanBatch
from minipic_backend.plugin.enable import span_config
from minipic_backend.spans.segments import SegmentKind

_NO_QUERIES = np.empty(0, dtype=np.int64)
_STAND_IN_RATIO = 2
"""From so many tokens of context runs for one of the others on, FlashAttention gets the batch as it
lies: to copy queries out of it and results back in every layer costs more than to attend to the
others for nothing (by estimate)."""

__all__ = ["SpanFlashBackend", "SpanFlashImpl", "SpanFlashMetadataBuilder"]


@dataclass
class SpanFlashMetadata(FlashAttentionMetadata):
    """vLLM's metadata, over the context runs only, and the work on the others.

    Args:
        context_queries: indices of the context runs' queries in the batch, int64; None: it gets
            the whole batch as it lies, with stand-ins for the other runs.
        work: of the runs that FlashAttention does not serve; None: there are none.
    """

    context_queries: torch.Tensor | None = None
    work: SpanWork | None = None


class SpanFlashBackend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[SpanFlashImpl]:
        return SpanFlashImpl

    @staticmethod
    def get_builder_cls() -> type[SpanFlashMetadataBuilder]:
        return SpanFlashMetadataBuilder


class SpanFlashMetadataBuilder(FlashAttentionMetadataBuilder):
    """Builds vLLM's metadata, and ours from the `SpanBatch` that the model state hands over.

    `graph_rows` is set by the runner, `captures` while it captures the graphs of batches with
    spans, and `max_copied_keys` is lowered where little memory is left.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.span_config = span_config(self.vllm_config)
        self.is_unrotated = self.span_config.key_encoding == "unrotated"
        self.shape = AttentionShape(
            self.num_heads_q,
            self.num_heads_kv,
            self.headdim,
            self.block_size,
            unrotated=self.is_unrotated,
        )
        is_fp8 = is_quantized_kv_cache(self.cache_config.cache_dtype)
        self.max_copied_keys = 0 if is_fp8 else max_compact_keys(self.shape)
        self.max_sequences: int = self.vllm_config.scheduler_config.max_num_seqs
        self.graph_rows: GraphRows | None = None
        self.captures: GraphKind | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        spans: SpanBatch | None = None,
    ) -> FlashAttentionMetadata:
        common = common_attn_metadata
        graph = self.captures if spans is None else spans.graph
        if graph is not None:
            assert self.graph_rows is not None
            # No query is FlashAttention's: it needs no schedule made ahead.
            metadata = _widen(super().build(0, common, fast_build=True))
            metadata.context_queries = torch.empty(0, dtype=torch.int64, device=self.device)
            metadata.work = self.graph_rows.work(graph, common, spans)
            return metadata
        if spans is None:
            return super().build(common_prefix_len, common, fast_build)
        return self._build_mixed(common, spans, fast_build)

    def _build_mixed(
        self, common: CommonAttentionMetadata, spans: SpanBatch, fast_build: bool
    ) -> SpanFlashMetadata:
        context: list[PlacedRun] = []
        others: list[PlacedRun] = []
        for placed in spans.placed():
            is_context = placed.run.kind is not SegmentKind.DEPENDENT and not self.is_unrotated
            (context if is_context else others).append(placed)
        in_place = bool(others) and _STAND_IN_RATIO * _num_tokens(others) <= _num_tokens(context)
        if in_place:
            stand_ins = [_stand_in(placed, self.block_size) for placed in others]
            sequences = sorted((*context, *stand_ins), key=lambda placed: placed.query)
        else:
            sequences = context
        batch = self._context_batch(common, sequences) if sequences else common
        # vLLM's buffer for a schedule made ahead has room for as many sequences as requests.
        fast_build = fast_build or len(sequences) > self.max_sequences
        metadata = _widen(super().build(0, batch, fast_build))
        if others:
            metadata.work = plan_dependent(
                others, common.block_table_tensor, self.shape, max_keys=self.max_copied_keys
            )
        if others and not in_place:
            metadata.context_queries = async_tensor_h2d(
                np.concatenate([_NO_QUERIES, *(_queries(placed) for placed in context)]),
                device=self.device,
            )
        return metadata

    def _context_batch(
        self, common: CommonAttentionMetadata, context: list[PlacedRun]
    ) -> CommonAttentionMetadata:
        """The context runs as a batch of ordinary sequences: frame blocks, then own blocks."""
        sequences = context_sequences(context, common.block_table_tensor, self.block_size)
        num_queries = np.array([placed.run.num_tokens for placed in context], dtype=np.int32)
        start_loc = np.concatenate([[0], np.cumsum(num_queries)]).astype(np.int32)
        return common.replace(
            query_start_loc=sequences.cu_seqlens_q,
            query_start_loc_cpu=torch.from_numpy(start_loc),
            seq_lens=sequences.seqused_k,
            seq_lens_cpu_upper_bound=None,
            num_reqs=len(context),
            num_actual_tokens=int(start_loc[-1]),
            max_query_len=sequences.max_seqlen_q,
            max_seq_len=sequences.max_seqlen_k,
            block_table_tensor=sequences.block_table,
            is_prefilling=None,
        )


class SpanFlashImpl(FlashAttentionImpl):
    """vLLM's FlashAttention, and our kernels where a query sees several segments.

    `rotary` is set by the runner once the model is loaded.
    """

    rotary: Rotary | None = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        metadata = attn_metadata
        if not isinstance(metadata, SpanFlashMetadata) or metadata.work is None:
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
        assert self.rotary is not None
        if metadata.context_queries is None:
            super().forward(layer, query, key, value, kv_cache, metadata, output)
        elif metadata.context_queries.numel():
            out = torch.empty_like(output[: metadata.num_actual_tokens])
            super().forward(
                layer,
                _select(query, metadata.context_queries),
                key,
                value,
                kv_cache,
                metadata,
                out,
            )
            output.index_copy_(0, metadata.context_queries, out)
        key_cache, value_cache = self._split(kv_cache)
        run_dependent(
            metadata.work,
            query,
            key_cache,
            value_cache,
            self.rotary,
            output,
            scale=self.scale,
            soft_cap=self.logits_soft_cap,
            q_scale=layer._q_scale_float if query.dtype.itemsize == 1 else 1.0,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            attend=self._attend,
        )
        return output

    def warm_up(
        self,
        layer: Any,
        shape: AttentionShape,
        dtype: torch.dtype,
        *,
        max_reqs: int,
        max_tokens: int,
    ) -> int:
        """Compiles what this layer needs behind spans; how many compilations that were."""
        assert self.rotary is not None
        key_cache, value_cache = self._split(layer.kv_cache)
        return warm_up(
            shape,
            key_cache,
            value_cache,
            self.rotary,
            dtype=dtype,
            query_dtype=None if layer.query_quant is None else key_cache.dtype,
            max_reqs=max_reqs,
            max_tokens=max_tokens,
            scale=self.scale,
            soft_cap=self.logits_soft_cap,
            attend=None if is_quantized_kv_cache(self.kv_cache_dtype) else self._attend,
        )

    def _split(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As FlashAttentionImpl does: [num_blocks, block_size, num_kv_heads, head_size] each.

        One KV head (of this rank) may come with a stride that FlashAttention cannot use.
        """
        parts = torch.split(kv_cache.transpose(1, 2), self.head_size, dim=-1)
        if is_quantized_kv_cache(self.kv_cache_dtype):
            parts = tuple(part.view(current_platform.fp8_dtype()) for part in parts)
        return tuple(canonicalize_singleton_dim_strides(part) for part in parts)

    def _attend(self, **arguments: Any) -> torch.Tensor:
        """FlashAttention over keys one behind the other."""
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        return flash_attn_varlen_func(  # type: ignore[no-any-return]
            **arguments, fa_version=self.vllm_flash_attn_version
        )


def _widen(metadata: FlashAttentionMetadata) -> SpanFlashMetadata:
    own = {item.name: getattr(metadata, item.name) for item in fields(FlashAttentionMetadata)}
    return SpanFlashMetadata(**own)


def _select(query: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of the queries, which may be fp8: bytes are selected as such."""
    if query.dtype.itemsize > 1:
        return query.index_select(0, indices)
    return query.view(torch.uint8).index_select(0, indices).view(query.dtype)


def _num_tokens(runs: list[PlacedRun]) -> int:
    return sum(placed.run.num_tokens for placed in runs)


def _stand_in(placed: PlacedRun, block_size: int) -> PlacedRun:
    """A dependent run as a causal sequence that sees itself alone, from the block on in which it
    starts: queries of a batch have no gaps. What comes out is overwritten."""
    run = placed.run
    first = run.start - run.start % block_size
    return replace(placed, run=Run(SegmentKind.PREFIX, run.start, run.end, first, 0, ()))


def _queries(placed: PlacedRun) -> NDArray[np.int64]:
    return np.arange(placed.query, placed.query + placed.run.num_tokens, dtype=np.int64)
