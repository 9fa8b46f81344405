"""The limits of `check.py` are far below what any mistake in the semantics would do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from check import DECODE, HAS_TILES, PREFILL, TO_TRUTH, distance
from prompts import PromptMaker

from minipic_backend.config import SpanOptions
from minipic_backend.spans.segments import SegmentKind, SegmentTable, parse_segments

MISTAKES = {
    "every token sees everything": lambda table: None,
    "spans do not see the frame": lambda table: _options(table, frame="none"),
    "pads are seen": lambda table: replace(
        table, segments=tuple(replace(segment, num_pads=0) for segment in table.segments)
    ),
    "markers are not seen": lambda table: _options(table, see_markers=False),
    "a span was computed behind another": lambda table: _second(table, kind=SegmentKind.DEPENDENT),
    "padded offsets instead of compact ones": lambda table: replace(
        table,
        segments=tuple(replace(segment, offset=segment.start) for segment in table.segments),
    ),
    "one span stands one position too far": lambda table: _second(
        table, offset=table.segments[2].offset + 1
    ),
}
GROSS = list(MISTAKES)[:4]
SUBTLE = list(MISTAKES)[-1:]
"""Within the limits of bfloat16, but far outside of those of float32."""
if HAS_TILES:
    SUBTLE += ["a span was computed behind another"]


@pytest.fixture
def case(exact_rig: Any) -> tuple[list[int], SegmentTable]:
    prompt = PromptMaker(exact_rig.engine.tokenizer, exact_rig.config).usual(5)
    table = parse_segments(prompt, exact_rig.config, SpanOptions())
    assert table is not None
    return prompt, table


@pytest.mark.parametrize("mistake", MISTAKES)
def test_limits_exclude_a_mistake(
    truth: Any, case: tuple[list[int], SegmentTable], mistake: str
) -> None:
    prompt, table = case
    wrong = MISTAKES[mistake](table)
    error = distance(truth.logprobs(prompt, wrong), truth.logprobs(prompt, table))
    assert error > 30 * max(limit["float32"] for limit in (TO_TRUTH, PREFILL, DECODE))
    if mistake not in SUBTLE:
        assert error > 1.3 * PREFILL["bfloat16"]
    if mistake in GROSS:
        assert error > 1.3 * max(TO_TRUTH["bfloat16"], DECODE["bfloat16"])


def test_an_ordinary_prompt_is_as_far_from_the_reference(rig: Any, truth: Any, make: Any) -> None:
    """The limits leave spans no more room than vLLM's own computation takes, times a few."""
    prompt = make.encode("Tell me about Python generators and how they are used in loops. " * 10)
    rig.reset()
    answer = rig.run(prompt)
    error = distance(answer.logprobs, truth.logprobs(prompt, None))
    assert TO_TRUTH[rig.dtype] / 20 < error < TO_TRUTH[rig.dtype]


def test_tapped_logits_are_what_vllm_reports(exact_rig: Any) -> None:
    prompt = PromptMaker(exact_rig.engine.tokenizer, exact_rig.config).usual(2)
    params = exact_rig.params(num_tokens=2, logprobs=-1)
    (first, second) = [
        position
        for delta in exact_rig.driver.submit(prompt, params).deltas()
        for position in delta.outputs[0].logprobs
    ]
    tapped = exact_rig.run(prompt, num_tokens=2).logprobs
    for got, reported in zip(tapped, (first, second), strict=True):
        ids = torch.tensor(list(reported))
        want = torch.tensor([entry.logprob for entry in reported.values()]).double()
        assert len(ids) == exact_rig.driver.llm.vllm_config.model_config.get_vocab_size()
        torch.testing.assert_close(got[ids], want, rtol=0, atol=1e-4)


def _options(table: SegmentTable, **changes: Any) -> SegmentTable:
    """The same prompt under other options; only frame and see_markers make a difference here."""
    options = replace(table.options, **changes)
    segments = tuple(
        replace(segment, cached_position=0)
        if segment.kind is SegmentKind.SPAN and options.frame == "none"
        else segment
        for segment in table.segments
    )
    return replace(table, options=options, segments=segments)


def _second(table: SegmentTable, **changes: Any) -> SegmentTable:
    """The second span changed."""
    if "kind" in changes:
        changes["cached_position"] = table.segments[2].offset
    second = replace(table.segments[2], **changes)
    return replace(table, segments=(*table.segments[:2], second, *table.segments[3:]))
