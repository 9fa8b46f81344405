"""FULL CUDA graphs for batches with spans: a second set beside vLLM's, and what they read.

A graph holds the attention that was captured in it. So decode batches are captured twice, with
stock attention and with ours, and each step replays the one that its batch needs: requests without
spans pay nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from minipic_backend.attention.dispatch import (
    SpanWork,
    graph_work,
    refresh_graph_work,
)
from minipic_backend.attention.geometry import AttentionShape
from minipic_backend.attention.rows import OPEN_END, QueryRows, RowSegments, SeenSegment
from minipic_backend.errors import ConfigurationError
from minipic_backend.plugin.cuda_state import SpanBatch

__all__ = ["GraphRows", "SpanCudaGraphManager"]

_WHOLE = SeenSegment(0, OPEN_END, 0, 0)


class GraphRows:
    """One query a request, on the device at fixed addresses.

    Args:
        max_num_reqs: rows, at most.
        capacity: segments of all rows together, at most.
        device: of the tensors.
        shape: of the attention layers.
    """

    def __init__(
        self, max_num_reqs: int, capacity: int, device: torch.device, shape: AttentionShape
    ) -> None:
        self.capacity = capacity
        self._device = device
        bounds = torch.zeros((2, max_num_reqs), dtype=torch.int32, device=device)
        values = torch.zeros((4, capacity), dtype=torch.int32, device=device)
        self._bounds, self._values = bounds, values
        self._key: tuple[Any, ...] | None = None
        self._work = graph_work(
            max_num_reqs,
            device,
            unrotated=shape.unrotated,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            block_size=shape.block_size,
        )

    def work(self, common: Any, spans: SpanBatch | None) -> SpanWork:
        """The work of a batch; without `spans`, of a dummy batch that is captured."""
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
        segments = RowSegments(
            self._bounds[0, :num_rows], self._bounds[1, :num_rows], *self._values.unbind(0)
        )
        return refresh_graph_work(self._work, rows, segments)

    def _fill(self, seen: list[Any], num_rows: int) -> None:
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
    """vLLM's graphs, and a second set of its FULL ones."""

    span_builders: list[Any]
    stock_graphs: dict[Any, Any]
    span_graphs: dict[Any, Any]
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
        return manager  # type: ignore[no-any-return]

    def select(self, *, spans: bool) -> None:
        """Chooses the set that the next step replays."""
        self.graphs = self.span_graphs if spans else self.stock_graphs

    def release_graphs(self) -> None:
        self.span_graphs.clear()
        self.stock_graphs.clear()
        super().release_graphs()

    def capture(self, *args: Any, **kwargs: Any) -> None:
        self.select(spans=False)
        super().capture(*args, **kwargs)
        full = CUDAGraphMode.FULL
        every = self._capture_descs
        if full not in every:
            return
        self._capture_descs = {full: every[full]}
        self.select(spans=True)
        kwargs["progress_bar_desc"] = "Capturing CUDA graphs for spans"
        try:
            for builder in self.span_builders:
                builder.captures_spans = True
            super().capture(*args, **kwargs)
        finally:
            for builder in self.span_builders:
                builder.captures_spans = False
            self._capture_descs = every
            self.select(spans=False)
