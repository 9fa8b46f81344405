"""FULL CUDA graphs for batches with spans: a second set beside vLLM's, and what they read.

A graph holds the attention that was captured in it. So decode batches are captured twice, with
stock attention and with ours, and each step replays the one that its batch needs: requests without
spans pay nothing. Steps of few tokens in rows of any length (questions behind cached documents) are
captured with our attention alone: vLLM's own way, a graph for each piece between two layers of
attention, keeps the host busy for longer than the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from minipic_backend.attention.dispatch import (
    QUESTION_SIZES,
    SpanWork,
    graph_work,
    refresh_graph_work,
)
from minipic_backend.attention.geometry import AttentionShape
from minipic_backend.attention.rows import (
    OPEN_END,
    PlacedRun,
    QueryRows,
    RowSegments,
    Run,
    SeenSegment,
)
from minipic_backend.errors import ConfigurationError
from minipic_backend.plugin.cuda_state import GraphKind, SpanBatch
from minipic_backend.spans.segments import SegmentKind

__all__ = ["GraphRows", "SpanCudaGraphManager"]

_WHOLE = SeenSegment(0, OPEN_END, 0, 0)
_DUMMY = Run(SegmentKind.PREFIX, 0, 1, 0, 0, (_WHOLE,))


class GraphRows:
    """What the kernels of a FULL CUDA graph read, on the device at fixed addresses: in a decode
    graph a row for each request, in a question graph one for each run.

    Args:
        max_num_reqs: requests, at most.
        capacity: segments of all rows together, at most.
        device: of the tensors.
        shape: of the attention layers.
    """

    def __init__(
        self, max_num_reqs: int, capacity: int, device: torch.device, shape: AttentionShape
    ) -> None:
        self._device = device
        self._shape = shape
        max_rows = max(max_num_reqs, QUESTION_SIZES[-1])
        self._bounds = torch.zeros((2, max_rows), dtype=torch.int32, device=device)
        self._values = torch.zeros((4, capacity), dtype=torch.int32, device=device)
        self._key: tuple[Any, ...] | None = None
        self._decode = graph_work(shape, max_num_reqs, device)
        self._questions: dict[int, SpanWork] = {}
        # Of a question graph's rows: first and last query, tokens, request.
        self._rows = torch.zeros((4, QUESTION_SIZES[-1]), dtype=torch.int32, device=device)
        self._block_table: torch.Tensor | None = None

    def work(self, kind: GraphKind, common: Any, spans: SpanBatch | None) -> SpanWork:
        """The work of a batch.

        Args:
            kind: of the graph.
            common: vLLM's metadata of the batch, padded to the sizes of the graph.
            spans: the batch; None: a dummy one, which is captured.
        """
        if kind == "decode":
            return self._decode_work(common, spans)
        size = common.num_actual_tokens
        placed = [PlacedRun(0, i, _DUMMY) for i in range(size)] if spans is None else spans.placed()
        return self._question_work(size, placed, common.block_table_tensor)

    def _question_work(
        self, size: int, placed: Sequence[PlacedRun], block_table: torch.Tensor
    ) -> SpanWork:
        if self._block_table is None:
            self._block_table = block_table.new_zeros((QUESTION_SIZES[-1], block_table.shape[1]))
        num_rows = len(placed)
        fields = [(p.query, p.query + p.run.num_tokens, p.run.end, p.request) for p in placed]
        rows = self._rows[:, :num_rows]
        values = np.ascontiguousarray(np.array(fields, dtype=np.int32).T)
        rows.copy_(async_tensor_h2d(values, device=self._device))
        tables = self._block_table[:num_rows]
        torch.index_select(block_table, 0, rows[3], out=tables)
        segments = self._segments([p.run.seen for p in placed], num_rows)
        self._key = None
        if size not in self._questions:
            self._questions[size] = graph_work(self._shape, size, self._device, max_query_len=size)
        queries = QueryRows(rows[0], rows[1], rows[2], tables, size, size)
        return refresh_graph_work(self._questions[size], queries, segments)

    def _decode_work(self, common: Any, spans: SpanBatch | None) -> SpanWork:
        num_rows = common.num_reqs
        if spans is None or spans.key is None or spans.key != self._key:
            seen = [(_WHOLE,)] * num_rows if spans is None else [r[0].seen for r in spans.runs]
            self._fill(seen, num_rows)
            self._key = spans.key if spans is not None else None
        rows = QueryRows(
            common.query_start_loc[:-1],
            common.query_start_loc[1:],
            common.seq_lens,
            common.block_table_tensor,
            1,
            num_rows,
        )
        return refresh_graph_work(self._decode, rows, self._filled(num_rows))

    def _segments(self, seen: Sequence[Sequence[SeenSegment]], num_rows: int) -> RowSegments:
        self._fill(seen, num_rows)
        return self._filled(num_rows)

    def _filled(self, num_rows: int) -> RowSegments:
        return RowSegments(
            self._bounds[0, :num_rows], self._bounds[1, :num_rows], *self._values.unbind(0)
        )

    def _fill(self, seen: Sequence[Sequence[SeenSegment]], num_rows: int) -> None:
        flat = [(s.start, s.end, s.shift, s.base) for row in seen for s in row]
        ends = np.zeros((2, num_rows), dtype=np.int32)
        lengths = np.cumsum([len(row) for row in seen], dtype=np.int32)
        ends[1, : len(seen)] = lengths
        ends[0, 1 : len(seen)] = lengths[:-1]
        values = np.asarray(flat, dtype=np.int32).T
        self._bounds[:, :num_rows].copy_(async_tensor_h2d(ends, device=self._device))
        self._values[:, : values.shape[1]].copy_(
            async_tensor_h2d(np.ascontiguousarray(values), device=self._device)
        )


class SpanCudaGraphManager(ModelCudaGraphManager):
    """vLLM's graphs, a second set of its FULL ones, and graphs of questions.

    `question_descs` are those of the latter, the largest first.
    """

    span_builders: list[Any]
    stock_graphs: dict[Any, Any]
    span_graphs: dict[Any, Any]
    question_descs: list[Any]
    takes_questions: bool
    _capture_descs: dict[Any, Any]

    @classmethod
    def adopt(cls, manager: Any, builders: list[Any]) -> SpanCudaGraphManager:
        """Takes over a manager that vLLM built inside `initialize_kv_cache`."""
        if type(manager) is not ModelCudaGraphManager:
            raise ConfigurationError(f"Spans do not work with vLLM's {type(manager).__name__}")
        manager.__class__ = cls
        manager.span_builders = builders
        manager.stock_graphs = manager.graphs
        manager.span_graphs = {}
        manager.question_descs = manager._question_descs()
        manager.takes_questions = False
        return manager  # type: ignore[no-any-return]

    def _question_descs(self) -> list[Any]:
        full = self._capture_descs.get(CUDAGraphMode.FULL)
        parallel = self.vllm_config.parallel_config
        # Data parallel ranks agree on a graph by its kind, which says nothing of spans.
        if not full or parallel.data_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
            return []
        most = self.vllm_config.scheduler_config.max_num_batched_tokens
        return [
            BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.FULL,
                num_tokens=size,
                num_reqs=min(size, self.max_num_reqs),
                num_active_loras=num_loras,
            )
            for size in reversed(QUESTION_SIZES)
            if size <= most
            for num_loras in self.lora_capture_cases
        ]

    def select(self, *, spans: bool, questions: bool = False) -> None:
        """Chooses the set that the next step replays, and whether a question graph may serve it."""
        self.graphs = self.span_graphs if spans else self.stock_graphs
        self.takes_questions = questions

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self.takes_questions:
            loras = self._resolve_effective_loras(num_active_loras)
            for desc in reversed(self.question_descs):
                fits = desc.num_tokens >= num_tokens and desc.num_active_loras == loras
                if fits and desc in self.graphs:
                    return desc
        return super().dispatch(
            num_reqs, num_tokens, uniform_token_count, num_active_loras, *args, **kwargs
        )

    def release_graphs(self) -> None:
        self.span_graphs.clear()
        self.stock_graphs.clear()
        super().release_graphs()

    def capture(self, *args: Any, **kwargs: Any) -> None:
        every = self._capture_descs
        full = every.get(CUDAGraphMode.FULL)
        sets: list[tuple[GraphKind | None, dict[Any, Any]]] = [(None, every)]
        if full:
            sets.append(("decode", {CUDAGraphMode.FULL: full}))
        if self.question_descs:
            sets.append(("question", {CUDAGraphMode.FULL: self.question_descs}))
        # All runs of the model leave their output in one buffer, those that only warm up a graph,
        # of whichever mode, too. The first one makes it: the largest.
        sets.sort(key=lambda one: _most_tokens(one[1]), reverse=True)
        try:
            for kind, descs in sets:
                self._capture_descs = descs
                self.select(spans=kind is not None)
                for builder in self.span_builders:
                    builder.captures = kind
                own = {"progress_bar_desc": f"Capturing CUDA graphs for spans, {kind}"}
                super().capture(*args, **(kwargs | own if kind else kwargs))
        finally:
            for builder in self.span_builders:
                builder.captures = None
            self._capture_descs = every
            self.select(spans=False)


def _most_tokens(descs_of_modes: dict[Any, Any]) -> int:
    every = (desc for descs in descs_of_modes.values() for desc in descs)
    return max((desc.num_tokens for desc in every), default=0)
