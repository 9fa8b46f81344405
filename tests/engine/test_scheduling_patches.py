"""Patches and places in the scheduler, without a model: spans are shared with all techniques."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from step_rig import BLOCK_SIZE, StepRig, prompt

from minipic_backend.config import CONFIG_KEY, SpanOptions
from minipic_backend.plugin.span_jobs import JOB_PREFIX
from minipic_backend.spans.patches import Patch, Place
from minipic_backend.spans.segments import SegmentKind, parse_segments


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shape")


@pytest.fixture(params=[0, 1], ids=["as on a CPU", "a step ahead"])
def rig(request: pytest.FixtureRequest, folder: Path) -> Any:
    rig = StepRig(folder, ahead=request.param)
    yield rig
    rig.finish()
    rig.assert_idle()


NONE = SpanOptions("none")


def epic(rig: StepRig, *documents: int) -> tuple[list[int], SpanOptions]:
    """A prompt with each document's first block computed anew."""
    plain = prompt(*documents)
    table = parse_segments(plain, rig.config, NONE)
    assert table is not None
    front, patches = plain[: table.last.start], []
    for segment in table.segments:
        if segment.kind is SegmentKind.SPAN:
            patches.append(Patch(len(front), segment.start, segment.start + BLOCK_SIZE))
            front += plain[segment.start : segment.start + BLOCK_SIZE]
    return [*front, *plain[table.last.start :]], replace(NONE, patches=tuple(patches))


def test_spans_of_other_techniques_are_hits_up_to_the_patches(rig: StepRig) -> None:
    rig.run(prompt(1, 2, 3), NONE)
    ids, options = epic(rig, 3, 1, 2)
    served = rig.run(ids, options)
    assert served.num_cached == options.patches[0].at
    assert max(rig.computed.values()) == 1
    again = rig.run(ids, options)
    assert again.num_cached == (len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_missing_spans_are_jobs_of_their_own(rig: StepRig) -> None:
    rig.run(prompt(1, 2), NONE)
    rig.steps.clear()
    ids, options = epic(rig, 8, 1, 9, 2)
    served = rig.run(ids, options)
    jobs = [name for name in rig.steps[0] if name.startswith(JOB_PREFIX)]
    assert len(jobs) == 2
    computed = rig.steps[0][served.request.request_id]
    assert computed == len(ids) - options.patches[0].at
    assert max(rig.computed.values()) == 1


def test_other_patches_are_other_blocks(rig: StepRig) -> None:
    ids, options = epic(rig, 1, 2)
    rig.run(ids, options)
    first, second = options.patches
    other = replace(options, patches=(first, replace_end(second)))
    assert rig.run(ids, other).num_cached == second.at


def replace_end(patch: Patch) -> Patch:
    return patch._replace(end=patch.end + 1)


@pytest.mark.parametrize("room", [5, 1, 0])
def test_answers_end_where_positions_do(rig: StepRig, room: int) -> None:
    """The model's positions, 4096, are used up by a reserved range, not by tokens."""
    ids = prompt(1, 2)
    table = parse_segments(ids, rig.config, NONE)
    assert table is not None
    offset = 4096 - room - table.last.num_tokens
    options = replace(NONE, places=(Place(table.last.start, offset),))
    served = rig.add(ids, options, num_tokens=50)
    # The engine's core never schedules such a request, which this rig does.
    assert served.request.abort_immediately == (room == 0)
    rig.finish()
    assert room == 0 or len(served.tokens) == room


@pytest.mark.parametrize(
    ("options", "early"),
    [
        (None, False),
        ({"frame": "none", "places": ()}, False),
        ('{"frame": "none", "places": []}', False),
        ({"frame": "none"}, False),
        ({"places": ((32, 64),)}, True),
        ('{"places": [[32, 64]]}', True),
    ],
)
def test_only_for_places_is_a_prompt_read_before_its_turn(
    rig: StepRig, options: Any, early: bool
) -> None:
    extra_args = {CONFIG_KEY: options} if options is not None else None
    served = rig.add(prompt(1, 2), sampling={"extra_args": extra_args})
    assert bool(served.request.block_hashes) == early
    rig.finish()
    assert len(served.request.block_hashes) == len(prompt(1, 2)) // BLOCK_SIZE
