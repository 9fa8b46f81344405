"""One task as two token sequences: the teacher's ordinary prompt, and the student's with spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minipic_backend.adapt.tasks import Task
from minipic_backend.attention.rows import split_runs
from minipic_backend.config import SpanConfig, SpanOptions, TechniqueSettings
from minipic_backend.errors import PromptError
from minipic_backend.layout.prompt_layout import Layout
from minipic_backend.spans.segments import SegmentKind, SegmentTable, parse_segments

__all__ = ["Example", "make_example"]


@dataclass(frozen=True, slots=True)
class Example:
    """What teacher and student are run on. Pads are left out: nothing sees them.

    Args:
        teacher_ids: int64 [num_teacher_tokens]: the prompt without markers, and the answer.
        student_ids: int64 [num_tokens]: prefix, spans, question and answer.
        positions: int64 [num_tokens], under which the student's tokens are computed.
        shifts: int64 [num_tokens], from there to where a dependent token sees them.
        mask: bool [num_tokens, num_tokens]: whom each of the student's tokens sees.
        dependent: bool [num_tokens]: tokens that see keys at their shifted positions.
        num_compared: the last tokens of both, question and answer, that are compared.
        num_answer: of these, the answer and its end.
    """

    teacher_ids: Tensor
    student_ids: Tensor
    positions: Tensor
    shifts: Tensor
    mask: Tensor
    dependent: Tensor
    num_compared: int
    num_answer: int

    def to(self, device: torch.device) -> Example:
        """The same on another device."""
        moved = {
            item.name: getattr(self, item.name).to(device, non_blocking=True)
            for item in fields(self)
            if isinstance(getattr(self, item.name), Tensor)
        }
        return replace(self, **moved)


def make_example(
    task: Task,
    layout: Layout,
    config: SpanConfig,
    settings: TechniqueSettings,
    options: SpanOptions,
    end_token: int | None,
    max_tokens: int,
) -> Example | None:
    """Lays a task out for teacher and student; None where it is longer than `max_tokens`.

    Raises:
        PromptError: the technique puts nothing into spans.
    """
    laid_out = layout.lay_out(task.prompt, settings, options=options)
    if laid_out.table is None:
        raise PromptError("This technique makes no spans: there is nothing to adapt to")
    answer = layout.encoder.encode(task.answer) + ([] if end_token is None else [end_token])
    tokens = np.array([*laid_out.token_ids, *answer], dtype=np.int64)
    if len(tokens) > max_tokens:
        return None
    table = parse_segments(tokens, config, laid_out.table.options)
    assert table is not None
    is_pad = np.zeros(len(tokens), dtype=np.bool_)
    is_dependent = np.zeros(len(tokens), dtype=np.bool_)
    is_original = np.ones(len(tokens), dtype=np.bool_)
    for segment in table.segments:
        is_pad[segment.end - segment.num_pads : segment.end] = True
        if segment.kind is not SegmentKind.SPAN:
            is_dependent[segment.start : segment.end] = True
        if segment.replaced:
            is_original[segment.start : segment.end] = False
    kept = np.flatnonzero(~is_pad)
    positions = table.cached_positions(0, len(tokens))
    shifts = table.logical_positions(0, len(tokens)) - positions
    reserved = np.isin(tokens, (config.ssep, config.pdep))
    num_compared = len(tokens) - table.last.start - 1
    mask = _mask(table, len(tokens))[np.ix_(kept, kept)]
    return Example(
        _tensor(tokens[~is_pad & ~reserved & is_original]),
        _tensor(tokens[kept]),
        _tensor(positions[kept]),
        _tensor(shifts[kept]),
        torch.from_numpy(mask),
        torch.from_numpy(is_dependent[kept]),
        num_compared,
        len(answer),
    )


def _mask(table: SegmentTable, num_tokens: int) -> NDArray[np.bool_]:
    """Whom each token sees: bool [num_tokens, num_tokens]."""
    mask = np.zeros((num_tokens, num_tokens), dtype=np.bool_)
    for run in split_runs(table, 0, num_tokens):
        for seen in run.seen:
            mask[run.start : run.end, seen.start : seen.end] = True
    return mask & np.tri(num_tokens, dtype=np.bool_)


def _tensor(values: Sequence[int] | np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
