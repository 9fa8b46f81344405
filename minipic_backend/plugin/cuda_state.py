"""What the GPU's model runner (V2) keeps of a request, and tells attention of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelSpecificAttnMetadata

from minipic_backend.attention.dispatch import suits_graph
from minipic_backend.attention.geometry import AttentionShape
from minipic_backend.attention.rows import PlacedRun, Run, split_runs
from minipic_backend.config import SpanConfig
from minipic_backend.errors import ConfigurationError
from minipic_backend.plugin.hasher import worker_segments
from minipic_backend.spans.segments import SegmentTable

__all__ = ["GraphKind", "SpanBatch", "SpanModelState"]

GraphKind = Literal["decode", "question"]
"""FULL CUDA graphs for batches with spans: one query a request, or few queries in rows of any
length."""


@dataclass(frozen=True)
class SpanBatch:
    """A batch in which some request has spans.

    Args:
        runs: of each request in batch order, the runs of its scheduled tokens.
        query_start: [num_reqs + 1], first query of each request in the batch.
        graph: the kind of FULL CUDA graph that serves it, if one does.
        key: equal for batches with equal `runs` apart from token indices; None: never equal.
    """

    runs: tuple[tuple[Run, ...], ...]
    query_start: NDArray[np.int32]
    graph: GraphKind | None
    key: tuple[Any, ...] | None

    def placed(self) -> list[PlacedRun]:
        """All runs, in the order of their queries."""
        result = []
        for request, runs in enumerate(self.runs):
            query = int(self.query_start[request])
            for run in runs:
                result.append(PlacedRun(request, query, run))
                query += run.num_tokens
        return result


class _SpanAttnMetadata(ModelSpecificAttnMetadata):
    """Hands a `SpanBatch` to our metadata builder."""

    def __init__(self, batch: SpanBatch) -> None:
        self._batch = batch

    def get_extra_attn_kwargs(self, attn_metadata_builder: Any, num_reqs: int) -> dict[str, Any]:
        return {"spans": self._batch}


class SpanModelState(DefaultModelState):
    """vLLM's state of a decoder, with the segments of each request that has any."""

    span_config: SpanConfig
    span_tables: dict[str, SegmentTable]
    row_shifts: torch.Tensor
    row_shifts_key: tuple[Any, ...] | None

    @classmethod
    def adopt(cls, state: Any, config: SpanConfig) -> SpanModelState:
        """Takes over a state that vLLM built: which class it builds is the model's say."""
        if type(state) is not DefaultModelState:
            raise ConfigurationError(f"Spans do not work with vLLM's {type(state).__name__}")
        state.__class__ = cls
        state.span_config = config
        state.span_tables = {}
        state.row_shifts = torch.zeros(state.max_num_reqs, dtype=torch.int64, device=state.device)
        state.row_shifts_key = None
        return state  # type: ignore[no-any-return]

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        table = worker_segments(new_req_data, self.span_config)
        if table is not None:
            self.span_tables[new_req_data.req_id] = table

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        self.span_tables.pop(req_id, None)

    def has_spans(self, req_ids: list[str]) -> bool:
        """Whether any of these requests needs more than stock attention."""
        if self.span_config.key_encoding == "unrotated":
            return True
        return bool(self.span_tables) and any(req_id in self.span_tables for req_id in req_ids)

    def num_segments(self, req_ids: list[str]) -> int:
        """Ranges of tokens that a batch sees: what one row of each request may need, at most."""
        tables = self.span_tables
        return sum(tables[i].max_seen if i in tables else 1 for i in req_ids)

    def suits_question_graph(
        self,
        req_ids: Sequence[str],
        starts: Sequence[int],
        counts: Sequence[int],
        shape: AttentionShape,
        capacity: int,
    ) -> bool:
        """Whether a batch with spans may be one graph though it is no batch of decodes.

        With `span_local` only where nothing but dependent tokens and decodes is computed: the rest
        is stock attention's.

        Args:
            req_ids: of the batch.
            starts: tokens of each request that are computed already.
            counts: tokens of each to be computed; not all one.
            shape: of the layers.
            capacity: ranges of tokens that all rows together may see.
        """
        if max(counts) == 1 or not suits_graph(shape, counts, starts):
            return False
        tables = [self.span_tables.get(req_id) for req_id in req_ids]
        if self.span_config.key_encoding != "unrotated":
            for table, start, count in zip(tables, starts, counts, strict=True):
                if count > 1 and (table is None or start < table.dependent_from):
                    return False
        # A row is a run inside of a segment, and segments are whole blocks.
        size = self.span_config.block_size
        most = (
            1 if table is None else table.max_seen * (count // size + 2)
            for table, count in zip(tables, counts, strict=True)
        )
        return sum(most) <= capacity

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: Any,
        slot_mappings: Any,
        attn_groups: Any,
        kv_cache_config: Any,
        for_capture: bool = False,
        ubatch_idx: int = 0,
        model_specific_attn_metadata: ModelSpecificAttnMetadata | None = None,
    ) -> dict[str, Any]:
        if not for_capture and self.has_spans(input_batch.req_ids):
            batch = self._span_batch(input_batch, is_full=cudagraph_mode.name == "FULL")
            model_specific_attn_metadata = _SpanAttnMetadata(batch)
        return super().prepare_attn(  # type: ignore[no-any-return]
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            for_capture,
            ubatch_idx,
            model_specific_attn_metadata,
        )

    def _span_batch(self, input_batch: Any, *, is_full: bool) -> SpanBatch:
        """Reads the batch, and overwrites its positions, from which the slots are taken by now."""
        req_ids = input_batch.req_ids
        tables = [self.span_tables.get(req_id) for req_id in req_ids]
        starts = input_batch.num_computed_tokens_np.tolist()
        counts = input_batch.num_scheduled_tokens.tolist()
        graph: GraphKind | None = None
        if is_full:
            graph = "decode" if max(counts) == 1 else "question"
        key: tuple[Any, ...] | None = None
        if graph == "decode":
            steady = all(
                table is None or start >= table.steady_from
                for table, start in zip(tables, starts, strict=False)
            )
            key = (tuple(req_ids), input_batch.num_reqs_after_padding) if steady else None
            self._shift_positions(input_batch, tables, starts, key)
        else:
            self._set_positions(input_batch, tables, starts, counts)
        runs = tuple(
            tuple(split_runs(table, start, start + count))
            for table, start, count in zip(tables, starts, counts, strict=False)
        )
        query_start = input_batch.query_start_loc_np[: len(req_ids) + 1]
        return SpanBatch(runs, query_start, graph, key)

    def _shift_positions(
        self, input_batch: Any, tables: list[Any], starts: list[int], key: tuple[Any, ...] | None
    ) -> None:
        if key is None or key != self.row_shifts_key:
            shifts = np.zeros(self.row_shifts.shape[0], dtype=np.int64)
            for row, (table, start) in enumerate(zip(tables, starts, strict=False)):
                if table is not None:
                    shifts[row] = int(table.cached_positions(start, start + 1)[0]) - start
            async_tensor_h2d(shifts, out=self.row_shifts)
            self.row_shifts_key = key
        num_reqs = input_batch.num_reqs
        input_batch.positions[:num_reqs].add_(self.row_shifts[:num_reqs])

    def _set_positions(
        self, input_batch: Any, tables: list[Any], starts: list[int], counts: list[int]
    ) -> None:
        pieces = [
            np.arange(start, start + count, dtype=np.int64)
            if table is None
            else table.cached_positions(start, start + count)
            for table, start, count in zip(tables, starts, counts, strict=False)
        ]
        positions = np.concatenate(pieces)
        async_tensor_h2d(positions, out=input_batch.positions[: positions.shape[0]])
