"""Worker and model runner of the CPU platform (vLLM's model runner V1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from minipic_backend.config import SpanConfig
from minipic_backend.errors import ConfigurationError
from minipic_backend.plugin import seams
from minipic_backend.plugin.cpu_attention import (
    BatchSegments,
    SpanCPUImpl,
    SpanCPUMetadataBuilder,
)
from minipic_backend.plugin.enable import check_config, check_layer_cache
from minipic_backend.plugin.hasher import worker_segments
from minipic_backend.plugin.rotary import find_rotary, skip_rotation
from minipic_backend.spans.segments import SegmentTable

__all__ = ["SpanCPUModelRunner", "SpanCPUWorker"]

_BACKEND = "minipic_backend.plugin.cpu_attention.SpanCPUBackend"


class SpanCPUWorker(CPUWorker):
    """vLLM's CPU worker with our model runner."""

    def init_device(self) -> None:
        config = check_config(self.vllm_config)
        super().init_device()
        if type(self.model_runner) is not CPUModelRunner:
            raise ConfigurationError(
                f"Spans need vLLM's model runner V1 on a CPU, not {type(self.model_runner)}"
            )
        # vLLM's worker names its runner's class in the middle of init_device: no registry.
        self.model_runner.__class__ = SpanCPUModelRunner
        self.model_runner.adopt(config)


class SpanCPUModelRunner(CPUModelRunner):
    """Gives each token its cached position, and the attention backend the batch's segments."""

    def adopt(self, config: SpanConfig) -> None:
        """What `__init__` would do, for a runner that vLLM has built."""
        self.span_config = config
        self.span_tables: dict[str, SegmentTable | None] = {}
        self.span_batch: BatchSegments | None = None

    def load_model(self, load_dummy_weights: bool = False) -> None:
        with seams.attention_backend("CPU_ATTN", _BACKEND):
            super().load_model(load_dummy_weights)
        name = self.model_config.model
        tables = find_rotary(self.model, name, self.model_config.max_model_len)
        layers = self.compilation_config.static_forward_context
        for layer_name, table in tables.items():
            impl = layers[layer_name].impl
            if not isinstance(impl, SpanCPUImpl):
                raise ConfigurationError(f"The span attention is not in place in {layer_name}")
            check_layer_cache(layers[layer_name], name)
            impl.rotary = table
        if self.span_config.key_encoding == "unrotated":
            skip_rotation(self.model)

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        super()._on_request_state_removed(req_id, req_state)
        self.span_tables.pop(req_id, None)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        num_reqs = self.input_batch.num_reqs
        batch = BatchSegments(
            tables=[self._segments(req_id) for req_id in self.input_batch.req_ids[:num_reqs]],
            num_computed=self.input_batch.num_computed_tokens_cpu[:num_reqs].tolist(),
            num_scheduled=num_scheduled_tokens.tolist(),
        )
        if batch.has_spans:
            self._set_positions(batch)
        self.span_batch = batch
        return prepared

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        for groups in self.attn_groups:
            for group in groups:
                builder = group.get_metadata_builder(0)
                if not isinstance(builder, SpanCPUMetadataBuilder):
                    raise ConfigurationError("The span metadata builder is not in place")
                builder.batch = self.span_batch
        try:
            return super()._build_attention_metadata(*args, **kwargs)
        finally:
            # A dummy batch that follows must not see this one's segments.
            self.span_batch = None

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        with self._prompts_draw_nothing():
            return super()._sample(*args, **kwargs)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        with self._prompts_draw_nothing():
            return super()._bookkeeping_sync(*args, **kwargs)

    @contextmanager
    def _prompts_draw_nothing(self) -> Iterator[None]:
        """Puts away the random generators of seeded requests that are in the middle of their
        prompts. vLLM lets them draw and then sets them back, which it fails at on a CPU."""
        generators = self.input_batch.generators
        (unfinished,) = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()
        kept = {i: generators.pop(i) for i in unfinished.tolist() if i in generators}
        try:
            yield
        finally:
            generators.update(kept)

    def _segments(self, req_id: str) -> SegmentTable | None:
        if req_id not in self.span_tables:
            self.span_tables[req_id] = worker_segments(self.requests[req_id], self.span_config)
        return self.span_tables[req_id]

    def _set_positions(self, batch: BatchSegments) -> None:
        """Overwrites vLLM's positions, from which the slots have been taken by now."""
        at = 0
        for table, start, count in zip(
            batch.tables, batch.num_computed, batch.num_scheduled, strict=True
        ):
            if table is not None:
                positions = table.cached_positions(start, start + count)
                self.positions[at : at + count] = torch.from_numpy(positions)
            at += count
