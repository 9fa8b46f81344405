"""One task as two token sequences: the teacher's ordinary prompt, and the student's with spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

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

__all__ = ["Example", "join", "make_example"]

QUESTION_WEIGHT = 0.1
"""Of the question's tokens in the loss; those of the answer have 1."""


@dataclass(frozen=True, slots=True)
class Example:
    """What teacher and student are run on: one prompt, or several behind each other that do not
    see each other. Pads are left out: nothing sees them.

    Args:
        teacher_ids: int64 [num_teacher_tokens]: the prompt without markers, and the answer.
        teacher_positions: int64 [num_teacher_tokens]; 0 where a prompt begins.
        student_ids: int64 [num_tokens]: prefix, spans, question and answer.
        positions: int64 [num_tokens], under which the student's tokens are computed.
        shifts: int64 [num_tokens], from there to where a dependent token sees them.
        mask: bool [num_tokens, num_tokens]: whom each of the student's tokens sees.
        dependent: bool [num_tokens]: tokens that see keys at their shifted positions.
        teacher_rows: int64 [num_compared]: the token in front of each that is compared, a token
            of a question or an answer.
        student_rows: int64 [num_compared], likewise.
        is_answer: bool [num_compared]: belongs to an answer; its end does, too.
        weights: float32 [num_compared]: of each token's divergence in the loss; an answer's sum
            up to 1.
    """

    teacher_ids: Tensor
    teacher_positions: Tensor
    student_ids: Tensor
    positions: Tensor
    shifts: Tensor
    mask: Tensor
    dependent: Tensor
    teacher_rows: Tensor
    student_rows: Tensor
    is_answer: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> Example:
        """The same on another device."""
        return Example(
            *(getattr(self, item.name).to(device, non_blocking=True) for item in fields(self))
        )


def join(examples: Sequence[Example], num_tokens: int) -> list[Example]:
    """The same prompts in fewer examples, in order.

    Args:
        examples: one or more.
        num_tokens: the most tokens of the student in one example that holds several.
    """
    groups: list[list[Example]] = []
    for example in examples:
        if groups and sum(len(e.student_ids) for e in [*groups[-1], example]) <= num_tokens:
            groups[-1].append(example)
        else:
            groups.append([example])
    return [_joined(group) if len(group) > 1 else group[0] for group in groups]


def _joined(group: Sequence[Example]) -> Example:
    def cat(name: str) -> Tensor:
        return torch.cat([getattr(example, name) for example in group])

    def shifted(rows: str, ids: str) -> Tensor:
        starts = np.cumsum([0, *(len(getattr(example, ids)) for example in group)])
        pairs = zip(group, starts.tolist(), strict=False)
        return torch.cat([getattr(example, rows) + start for example, start in pairs])

    return Example(
        cat("teacher_ids"),
        cat("teacher_positions"),
        cat("student_ids"),
        cat("positions"),
        cat("shifts"),
        _block_diagonal([example.mask for example in group]),
        cat("dependent"),
        shifted("teacher_rows", "teacher_ids"),
        shifted("student_rows", "student_ids"),
        cat("is_answer"),
        cat("weights"),
    )


def _block_diagonal(masks: Sequence[Tensor]) -> Tensor:
    """bool [sum of sizes, sum of sizes]."""
    whole: Tensor = torch.block_diag(*masks)  # type: ignore[no-untyped-call]
    return whole


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
    teacher = tokens.copy()
    for segment in table.segments:
        is_pad[segment.end - segment.num_pads : segment.end] = True
        if segment.kind is not SegmentKind.SPAN:
            is_dependent[segment.start : segment.end] = True
        if segment.replaced:
            is_original[segment.start : segment.end] = False
    if (seen := table.options.seen_prefix) is not None:
        # A primer is not the teacher's; its last token becomes the end of a line, where that lacks.
        end = table.segments[0].end
        ends_line = layout.encoder.decode((int(tokens[seen - 1]),))[-1:].isspace()
        is_original[seen : end if ends_line else end - 1] = False
        teacher[end - 1] = layout.encoder.newline
    kept = np.flatnonzero(~is_pad)
    positions = table.cached_positions(0, len(tokens))
    shifts = table.logical_positions(0, len(tokens)) - positions
    reserved = np.isin(tokens, (config.ssep, config.pdep))
    mask = _mask(table, len(tokens))[np.ix_(kept, kept)]
    teacher_ids = teacher[~is_pad & ~reserved & is_original]
    num_compared = len(tokens) - table.last.start - 1
    num_questions = num_compared - len(answer)
    before = np.arange(num_compared, 0, -1) + 1  # from the end, of the token in front
    is_answer = np.arange(num_compared) >= num_questions
    weights = np.where(is_answer, 1 / len(answer), QUESTION_WEIGHT / max(num_questions, 1))
    return Example(
        _tensor(teacher_ids),
        torch.arange(len(teacher_ids)),
        _tensor(tokens[kept]),
        _tensor(positions[kept]),
        _tensor(shifts[kept]),
        torch.from_numpy(mask),
        torch.from_numpy(is_dependent[kept]),
        _tensor(len(teacher_ids) - before),
        _tensor(len(kept) - before),
        torch.from_numpy(is_answer),
        torch.from_numpy(weights.astype(np.float32)),
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
