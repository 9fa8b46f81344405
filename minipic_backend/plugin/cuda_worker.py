"""Worker and model runner on CUDA (vLLM's model runner V2)."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from minipic_backend.attention.dispatch import max_compact_keys
from minipic_backend.attention.geometry import AttentionShape
from minipic_backend.attention.rotary import Rotary
from minipic_backend.config import SpanConfig
from minipic_backend.errors import ConfigurationError
from minipic_backend.plugin import seams
from minipic_backend.plugin.cuda_attention import (
    SpanFlashImpl,
    SpanFlashMetadataBuilder,
)
from minipic_backend.plugin.cuda_graphs import GraphRows, SpanCudaGraphManager
from minipic_backend.plugin.cuda_state import SpanModelState
from minipic_backend.plugin.enable import check_config, check_layer_cache
from minipic_backend.plugin.rotary import find_rotary, skip_rotation

__all__ = ["SpanCudaWorker", "SpanGPUModelRunner"]

_log = init_logger(f"vllm.{__name__}")  # vLLM configures loggers of its own name only

_BACKEND = "minipic_backend.plugin.cuda_attention.SpanFlashBackend"
_MIN_GRAPH_SEGMENTS = 1 << 16
"""Segments of one decode batch that graphs have room for; a batch with more runs without."""


class SpanCudaWorker(Worker):
    """vLLM's GPU worker with our model runner."""

    def _make_model_runner(self) -> Any:
        check_config(self.vllm_config)
        if not self.use_v2_model_runner:
            raise ConfigurationError(
                "Spans need vLLM's model runner V2 on CUDA, which is off here: unset "
                "VLLM_USE_V2_MODEL_RUNNER, or leave out the option that vLLM's log says it lacks"
            )
        return SpanGPUModelRunner(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> Any:
        self.model_runner.warm_up_spans()
        return super().compile_or_warm_up_model()


class SpanGPUModelRunner(GPUModelRunner):
    """Puts our attention, state and graphs in place, and chooses the graphs of each step."""

    model_state: Any
    cudagraph_manager: Any
    span_config: SpanConfig
    span_capacity: int
    span_shapes: set[AttentionShape]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        self.span_config = check_config(self.vllm_config)
        with seams.attention_backend("FLASH_ATTN", _BACKEND):
            super().load_model(*args, **kwargs)
        self.model_state = SpanModelState.adopt(self.model_state, self.span_config)
        tables = find_rotary(self.model, self.model_config.model, self.model_config.max_model_len)
        on_device: dict[int, Rotary] = {}
        layers = self.compilation_config.static_forward_context
        for name, table in tables.items():
            check_layer_cache(layers[name], self.model_config.model)
            impl = layers[name].impl
            if not isinstance(impl, SpanFlashImpl):
                raise ConfigurationError(f"The span attention is not in place in {name}")
            if id(table) not in on_device:
                on_device[id(table)] = replace(table, cos_sin=table.cos_sin.to(self.device))
            impl.rotary = on_device[id(table)]
        if self.span_config.key_encoding == "unrotated":
            skip_rotation(self.model)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> Any:
        result = super().initialize_kv_cache(*args, **kwargs)
        builders = [
            builder
            for groups in self.attn_groups
            for group in groups
            for builder in group.metadata_builders
        ]
        self.span_capacity = max(
            _MIN_GRAPH_SEGMENTS, self.max_model_len // self.span_config.block_size + 1
        )
        for builder in builders:
            if not isinstance(builder, SpanFlashMetadataBuilder):
                raise ConfigurationError("The span metadata builder is not in place")
            builder.graph_rows = GraphRows(
                self.max_num_reqs, self.span_capacity, self.device, builder.shape
            )
        self.span_shapes = {builder.shape for builder in builders}
        self.cudagraph_manager = SpanCudaGraphManager.adopt(self.cudagraph_manager, builders)
        return result

    def warm_up_spans(self) -> None:
        """Compiles the kernels behind spans, so that no request waits for it."""
        layers = self.compilation_config.static_forward_context
        seen: set[tuple[Any, ...]] = set()
        count, start = 0, time.perf_counter()
        for groups in self.attn_groups:
            for group in groups:
                shape = group.metadata_builders[0].shape
                for layer in (layers[name] for name in group.layer_names):
                    impl = layer.impl
                    rotary = impl.rotary
                    style = (shape, rotary.rotary_dim, rotary.is_neox, impl.logits_soft_cap > 0)
                    if style not in seen:
                        seen.add(style)
                        count += impl.warm_up(
                            layer,
                            shape,
                            self.dtype,
                            max_reqs=self.max_num_reqs,
                            max_tokens=self.max_num_tokens,
                        )

        torch.cuda.synchronize()
        self._bound_copies()
        seconds = time.perf_counter() - start
        _log.info("Compiled %d kernels for spans in %.1f seconds", count, seconds)

    def _bound_copies(self) -> None:
        """Copies of keys come on top of what vLLM measured: they take half of what is left."""
        free, _ = torch.cuda.mem_get_info()
        for groups in self.attn_groups:
            for group in groups:
                for builder in group.metadata_builders:
                    room = max_compact_keys(builder.shape, free)
                    builder.max_copied_keys = min(builder.max_copied_keys, room)

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        state, uniform = super().gather_batch_req_state(scheduler_output, dummy_run)
        spans = state is not None and self.model_state.has_spans(state.req_ids)
        if self.cudagraph_manager is not None:
            questions = spans and uniform is None and self._suits_question_graph(state)
            self.cudagraph_manager.select(spans=spans, questions=questions)
        if spans and self.model_state.num_segments(state.req_ids) > self.span_capacity:
            uniform = None  # no FULL graph for this step
        return state, uniform

    def _suits_question_graph(self, state: Any) -> bool:
        return all(
            self.model_state.suits_question_graph(
                state.req_ids,
                self.req_states.num_computed_tokens_np[state.idx_mapping_np].tolist(),
                state.num_scheduled_tokens.tolist(),
                shape,
                self.span_capacity,
            )
            for shape in self.span_shapes
        )
