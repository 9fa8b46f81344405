"""The scheduler, step by step, without a model: who computes what, when, and what it keeps.

`step_rig` holds every read of the cache against what the hashes say should be there.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from step_rig import BLOCK_SIZE, PAD, SSEP, StepRig, dependent, prefix, prompt, span
from vllm.v1.request import RequestStatus

from minipic_backend.config import SpanOptions
from minipic_backend.plugin.span_jobs import JOB_PREFIX

SPAN = 45  # tokens of a document without its pads
QUESTION = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shape")


@pytest.fixture
def rig(folder: Path) -> Any:
    rig = StepRig(folder)
    yield rig
    rig.finish()
    rig.assert_idle()


def jobs(step: dict[str, int]) -> list[int]:
    """Tokens of the internal requests of a step."""
    return [count for name, count in step.items() if name.startswith(JOB_PREFIX)]


def span_blocks(rig: StepRig, documents: range) -> set[bytes]:
    """Hashes of all blocks of documents behind the usual prefix."""
    return {h for number in documents for h in rig.hashes(prompt(number))[2:5]}


# ---- one request ------------------------------------------------------------------------------


def test_a_cold_request_alone_computes_in_place_in_one_step(rig: StepRig) -> None:
    served = rig.run(prompt(1, 2, 3))
    assert rig.steps == [{served.request.request_id: len(prompt(1, 2, 3))}]


@pytest.mark.parametrize("options", [SpanOptions("prefix"), SpanOptions("none")], ids=repr)
def test_a_miss_in_front_of_hits_is_computed_in_the_same_step(
    rig: StepRig, options: SpanOptions
) -> None:
    rig.run(prompt(1, 2, 3), options)
    rig.steps.clear()
    served = rig.run(prompt(9, 1, 2, 8, 3), options)
    (step,) = rig.steps
    assert jobs(step) == [SPAN, SPAN]
    assert step[served.request.request_id] == QUESTION
    assert served.num_cached == len(prompt(1, 2, 3)) - QUESTION


def test_with_frame_none_a_new_prefix_is_a_job_too(rig: StepRig) -> None:
    options = SpanOptions("none")
    rig.run(prompt(1, 2), options)
    rig.steps.clear()
    served = rig.run(prompt(1, 2, system=7), options)
    assert jobs(rig.steps[0]) == [2 * BLOCK_SIZE]
    assert served.num_cached == 2 * 3 * BLOCK_SIZE


def test_an_evicted_prefix_is_computed_once_and_first(rig: StepRig) -> None:
    rig.run(prompt(1, 2))
    blocks = rig.scheduler.block_cache.leading(rig.hashes(prefix()))
    rig.pool.evict_blocks({block.block_id for block in blocks})
    rig.computed.clear()
    rig.steps.clear()
    rig.run(prompt(5, 1, 6, 2))
    assert jobs(rig.steps[0]) == [2 * BLOCK_SIZE, SPAN, SPAN]
    assert max(rig.computed.values()) == 1


def test_misses_behind_the_last_hit_stay_in_the_request(rig: StepRig) -> None:
    rig.run(prompt(1, 2))
    rig.steps.clear()
    served = rig.run(prompt(7, 1, 8, 9))
    assert jobs(rig.steps[0]) == [SPAN]
    assert rig.steps[0][served.request.request_id] == 2 * 3 * BLOCK_SIZE + QUESTION


def test_a_document_given_twice_is_computed_once(rig: StepRig) -> None:
    rig.run(prompt(4, 4))
    assert all(rig.computed[block] == 1 for block in span_blocks(rig, range(4, 5)))


def test_a_document_behind_a_new_text_is_left_to_the_request(rig: StepRig) -> None:
    """What stands behind a dependent segment that must be computed cannot be read anyway."""
    rig.run(prompt(1, 2))
    rig.steps.clear()
    turn = [*dependent(8, 29), *[5] * 3]
    rig.run([*prefix(), *span(7), *span(1), *turn, *span(3), *span(2), *dependent()])
    assert jobs(rig.steps[0]) == [SPAN]


@pytest.mark.parametrize(
    "options",
    [SpanOptions("prefix"), SpanOptions("none"), SpanOptions("prefix", seen_prefix=9)],
    ids=["prefix", "none", "a primer"],
)
@pytest.mark.parametrize("num_pads", [0, 3])
def test_a_new_text_right_behind_the_prefix_is_a_job(
    rig: StepRig, options: SpanOptions, num_pads: int
) -> None:
    """A system prompt behind a universal frame: what stands behind it is read all the same."""

    def asked(system: int, *documents: int) -> list[int]:
        text = [*dependent(system, 2 * BLOCK_SIZE - num_pads), *[PAD] * num_pads]
        body = [token for number in documents for token in span(number)]
        return [*prefix(), *text, *body, *dependent()]

    rig.run(asked(8, 1, 2), options)
    assert rig.steps == [{name: len(asked(8, 1, 2)) for name in rig.steps[0]}]  # in place
    rig.steps.clear()
    served = rig.run(asked(9, 2, 7, 1), options)
    (step,) = rig.steps
    assert sorted(jobs(step)) == sorted([2 * BLOCK_SIZE - num_pads, SPAN])
    assert step[served.request.request_id] == QUESTION
    assert served.num_cached == len(prefix()) + 2 * 3 * BLOCK_SIZE
    rig.steps.clear()
    served = rig.run(asked(9, 1, 2), options)
    assert jobs(rig.steps[0]) == []
    assert served.num_cached == len(asked(9, 1, 2)) - QUESTION


def test_two_who_share_a_new_text_and_a_new_prefix_compute_them_once(rig: StepRig) -> None:
    options = SpanOptions("none")  # the spans are hits behind another prefix
    rig.run(prompt(1, 2), options)
    rig.steps.clear()
    text = dependent(8, 2 * BLOCK_SIZE)
    body = [*span(1), *span(2)]
    both = [rig.add([*prefix(5), *text, *body, *dependent(i)], options) for i in range(2)]
    rig.finish()
    assert sorted(jobs(rig.steps[0])) == sorted([len(prefix(5)), len(text)])
    assert [rig.steps[0][one.request.request_id] for one in both] == [QUESTION, QUESTION]


def test_a_text_with_a_whole_block_of_pads_is_left_to_the_request(rig: StepRig) -> None:
    """Which no layout makes; a prompt that ends in pads would be refused."""
    rig.run(prompt(1))
    rig.steps.clear()
    text = [*dependent(8, BLOCK_SIZE), *[PAD] * BLOCK_SIZE]
    rig.run([*prefix(), *text, *span(1), *dependent()])
    assert jobs(rig.steps[0]) == []


def test_documents_in_front_of_patches_are_shared(rig: StepRig) -> None:
    rig.run(prompt(1, 2))
    rig.steps.clear()
    spans = [*prefix(), *span(7), *span(1)]
    patch = (len(spans), 2 * BLOCK_SIZE, 3 * BLOCK_SIZE)  # the first block of document 7
    tokens = [*spans, *span(7)[:BLOCK_SIZE], *dependent()]
    served = rig.run(tokens, SpanOptions(patches=(patch,)))  # type: ignore[arg-type]
    assert jobs(rig.steps[0]) == [SPAN]
    assert rig.steps[0][served.request.request_id] == BLOCK_SIZE + QUESTION


def test_a_block_with_one_token_and_pads_is_published_too(rig: StepRig) -> None:
    rig.run(prompt(1))
    rig.steps.clear()
    padded = [*span(7)[:33], *[5] * 15]
    tokens = [*prefix(), *padded, *span(1), *dependent()]
    served = rig.run(tokens)
    assert jobs(rig.steps[0]) == [33]
    assert rig.steps[0][served.request.request_id] == QUESTION


def test_a_long_document_takes_several_steps_and_its_request_waits(rig: StepRig) -> None:
    long = span(3, num_blocks=70)
    rig.run(prompt(1))
    rig.steps.clear()
    served = rig.run([*prefix(), *long, *span(1), *dependent()])
    name = served.request.request_id
    assert [sum(jobs(step)) for step in rig.steps] == [512, 512, len(long) - 3 - 1024]
    assert [name in step for step in rig.steps] == [False, False, True]


def test_ordinary_prompts_and_requests_that_do_not_read_the_cache_have_no_jobs(
    rig: StepRig,
) -> None:
    rig.run(prompt(1))
    rig.steps.clear()
    rig.add([10, 11] * 40)
    rig.add(prompt(9, 1), sampling={"prompt_logprobs": 1})
    rig.step()
    assert jobs(rig.steps[0]) == []


@pytest.mark.parametrize("policy", ["interleaved", "batched"])
@pytest.mark.parametrize("max_num_seqs", [2, 32])
def test_a_cold_request_takes_at_most_one_step_more_than_in_place(
    folder: Path, policy: str, max_num_seqs: int
) -> None:
    num_steps = []
    for name in ("in_place", policy):
        rig = StepRig(folder, name, max_num_seqs=max_num_seqs)
        num_steps.append(rig.run(prompt(*range(4))).first_step)
    in_place, first = num_steps
    if policy == "interleaved":
        assert first == in_place
    elif max_num_seqs == 32:
        assert first <= in_place + 1


def test_rows_to_spare_are_given_for_pads(folder: Path) -> None:
    """As on CUDA: a cold prompt's spans become jobs where a step has more rows than it can use, and
    where their pads are at least a quarter of a block."""
    padded = [token for number in (1, 2) for token in [*span(number)[:-6], *[5] * 6]]
    cold = [*prefix(), *padded, *dependent()]
    for max_num_seqs, as_jobs in ((32, True), (16, False)):  # worth it from 32 or 64 tokens on
        rig = StepRig(folder, ahead=1, max_num_seqs=max_num_seqs)
        served = rig.run(cold)
        (step,) = rig.steps
        assert jobs(step) == ([2 * BLOCK_SIZE, 42, 42] if as_jobs else [])
        assert sum(step.values()) == len(cold) - 2 * 6 * as_jobs
        assert served.num_cached == 0
        assert served.figures is not None
        assert served.figures["computed_tokens"] == 2 * 3 * BLOCK_SIZE
        rig.steps.clear()
        rig.run(prompt(7))  # three pads
        assert jobs(rig.steps[0]) == []


# ---- several requests -------------------------------------------------------------------------


def test_requests_of_one_step_share_what_they_miss(rig: StepRig) -> None:
    rig.run(prompt(1))
    rig.computed.clear()
    rig.steps.clear()
    for documents in ((5, 6, 1), (6, 5, 1), (7, 6, 1)):
        rig.add(prompt(*documents))
    rig.step()
    assert jobs(rig.steps[0]) == [SPAN, SPAN, SPAN]
    assert all(rig.computed[block] == 1 for block in span_blocks(rig, range(5, 8)))


def test_a_request_waits_for_what_another_computes_in_place(folder: Path) -> None:
    """The other is cut into chunks, in favour of others; the first of them would otherwise
    compute the same once more."""
    rig = StepRig(folder, long_prefill_token_threshold=64)
    other = rig.add(prompt(1, 2, 3))
    mine = rig.add(prompt(3, 2, question=1))
    rig.finish()
    assert all(rig.computed[block] == 1 for block in span_blocks(rig, range(1, 4)))
    assert mine.figures is not None
    assert mine.figures["waited_tokens"] == 2 * 3 * BLOCK_SIZE
    assert mine.figures["wait_s"] > 0
    assert other.figures is not None
    assert other.figures["computed_tokens"] == 3 * 3 * BLOCK_SIZE


@pytest.mark.parametrize("cached_behind", [False, True], ids=["in place", "job"])
def test_a_request_does_not_wait_for_the_end_of_a_long_prompt(
    folder: Path, cached_behind: bool
) -> None:
    """Its document is the last of a prompt that takes many steps, behind much that it has no use
    for: computing it again costs less than to wait."""
    rig = StepRig(folder, long_prefill_token_threshold=256)
    rig.run(prompt(1))
    rig.steps.clear()
    body = [token for number in range(20, 80) for token in span(number)]
    slow = rig.add([*prefix(), *body, *span(5), *dependent()])
    rig.step()
    mine = rig.add(prompt(5, 1, question=1) if cached_behind else prompt(5, question=1))
    rig.finish()
    assert slow.first_step is not None
    assert mine.first_step is not None
    assert mine.first_step < slow.first_step - 3
    assert mine.figures is not None
    assert mine.figures["waited_tokens"] == 0
    assert mine.figures["computed_tokens"] == 3 * BLOCK_SIZE


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("policy", ["interleaved", "batched"])
def test_with_room_enough_every_document_is_computed_once(
    folder: Path, policy: str, ahead: int
) -> None:
    rng = random.Random(0)
    rig = StepRig(folder, policy, ahead=ahead)
    served = []
    while len(served) < 64:
        for _ in range(rng.randint(0, 3)):
            documents = rng.sample(range(20), 5)
            served.append(rig.add(prompt(*documents, question=len(served)), num_tokens=3))
        if rig.scheduler.has_requests():
            rig.step()
    rig.finish()
    rig.assert_idle()
    assert {rig.computed[block] for block in span_blocks(rig, range(20))} == {1}
    assert all(len(one.tokens) == 3 for one in served)
    figures = [one.figures for one in served if one.figures is not None]
    assert len(figures) == len(served)
    names = ("hit_tokens", "waited_tokens", "computed_tokens")
    assert {sum(one[name] for name in names) for one in figures} == {5 * 3 * BLOCK_SIZE}
    assert sum(one["computed_tokens"] for one in figures) == 20 * 3 * BLOCK_SIZE


def test_batched_computes_no_prompt_before_all_documents(folder: Path) -> None:
    rig = StepRig(folder, "batched", max_num_seqs=8)
    served = [rig.add(prompt(i, 10 + i)) for i in range(6)]
    rig.finish()
    have_jobs = [bool(jobs(step)) for step in rig.steps]
    have_prompts = [any(s.request.request_id in step for s in served) for step in rig.steps]
    last_job = max(i for i, any_jobs in enumerate(have_jobs) if any_jobs)
    assert last_job > 0
    assert have_prompts.index(True) >= last_job


def test_batched_keeps_back_no_prompt_without_documents(folder: Path) -> None:
    rig = StepRig(folder, "batched", max_num_seqs=2)
    served = [rig.add(prompt(i, 10 + i)) for i in range(3)]
    rig.step()
    assert rig.scheduler.planner.num_jobs
    ordinary = rig.add([10, 11] * 8)
    unread = rig.add(prompt(1), sampling={"prompt_logprobs": 1})
    rig.finish()
    rig.assert_idle()
    have_jobs = [bool(jobs(step)) for step in rig.steps]
    last_job = max(i for i, any_jobs in enumerate(have_jobs) if any_jobs)
    assert ordinary.request.request_id in rig.steps[last_job]
    assert unread.finished
    assert all(one.finished for one in served)


@pytest.mark.parametrize(
    ("ahead", "num_blocks", "max_num_seqs", "scheduling_policy"),
    list(itertools.product((0, 1), (24, 60, 1000), (2, 32), ("fcfs", "priority"))),
)
def test_nothing_leaks_and_nothing_hangs(
    folder: Path, ahead: int, num_blocks: int, max_num_seqs: int, scheduling_policy: str
) -> None:
    """64 requests over 20 documents, random arrivals and aborts, two tenants, two prefixes."""
    for policy, seed in itertools.product(("interleaved", "batched", "in_place"), range(2)):
        rng = random.Random(seed)
        rig = StepRig(
            folder,
            policy,
            num_blocks=num_blocks,
            ahead=ahead,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=rng.choice([64, 512]),
            max_model_len=16 * 24,
            scheduling_policy=scheduling_policy,
        )
        served: list[Any] = []
        while len(served) < 64 or not all(one.finished for one in served):
            while len(served) < 64 and rng.random() < 0.5:
                documents = [*rng.sample(range(20), rng.randint(1, 4)), 0, 0][: rng.randint(1, 5)]
                served.append(
                    rig.add(
                        prompt(
                            *documents,
                            question=rng.randint(0, 3),
                            system=rng.randint(0, 1),
                            text=rng.choice([None, 50, 51]),
                        ),
                        SpanOptions(
                            rng.choice(["none", "prefix"]), seen_prefix=rng.choice([None, 0, 17])
                        ),
                        num_tokens=rng.choice([1, 4, 30]),
                        priority=rng.randint(0, 2),
                        cache_salt=rng.choice([None, "tenant"]),
                    )
                )
            running = [one for one in served if not one.finished]
            if running and rng.random() < 0.08:
                rig.abort(rng.choice(running))
            if rig.scheduler.has_requests() or rig.pending:
                rig.advance()
            assert rig.num_steps < 5000
        rig.finish()
        rig.assert_idle()


# ---- what a job carries, and when it ends -----------------------------------------------------


def test_tenants_and_adapters_share_no_job(rig: StepRig) -> None:
    from vllm.lora.request import LoRARequest

    kinds: list[dict[str, Any]] = [
        {},
        {"cache_salt": "tenant"},
        {"lora_request": LoRARequest("adapter", 1, "/nowhere")},
    ]
    for kind in kinds:
        rig.add(prompt(1), **kind)
        rig.finish()
    rig.steps.clear()
    for kind in kinds:
        rig.add(prompt(2, 1), priority=3, **kind)
    made = []
    make = rig.scheduler.planner._maker.make

    def watch(*args: Any) -> Any:
        made.append(make(*args))
        return made[-1]

    rig.scheduler.planner._maker.make = watch
    rig.finish()
    assert [job.request.cache_salt for job in made] == [None, "tenant", None]
    assert [job.request.lora_request for job in made] == [
        kind.get("lora_request") for kind in kinds
    ]
    assert {job.request.priority for job in made} == {3}
    assert len({job.key for job in made}) == 3


def long_prompt(number: int = 3) -> list[int]:
    """A prompt whose first document takes three steps, and whose second is cached."""
    return [*prefix(), *span(number, num_blocks=70), *span(1), *dependent()]


def test_aborting_the_last_request_that_waits_cancels_the_job(rig: StepRig) -> None:
    rig.run(prompt(1))
    one, two = rig.add(long_prompt()), rig.add(long_prompt())
    rig.step()
    assert rig.scheduler.planner.num_jobs == 1
    rig.abort(one)
    rig.step()
    assert rig.scheduler.planner.num_jobs == 1
    rig.abort(two)
    assert rig.scheduler.planner.num_jobs == 0
    assert not rig.scheduler.requests
    assert rig.scheduler.get_num_unfinished_requests() == 0


def test_nothing_is_planned_for_a_request_that_ends_while_preempted(folder: Path) -> None:
    """Its last token is under way when it is preempted, two steps ahead of the device."""
    rig = StepRig(folder, ahead=2)
    served = rig.add(prompt(1, 2))
    rig.step()
    request, scheduler = served.request, rig.scheduler
    assert not served.tokens
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    first = scheduler.block_cache.leading(request.block_hashes[2:5])
    rig.pool.evict_blocks({block.block_id for block in first})
    rig.step()
    assert scheduler.planner.num_jobs == 0
    rig.finish()
    assert len(served.tokens) == 1
    rig.assert_idle()


def test_jobs_go_with_a_request_that_ends_by_its_output(rig: StepRig) -> None:
    """vLLM ends a preempted request without `finish_requests`."""
    rig.run(prompt(1))
    served = rig.add(long_prompt())
    rig.step()
    assert rig.scheduler.planner.num_jobs == 1
    assert rig.scheduler.holds
    rig.scheduler._end_jobs_of([served.request.request_id])
    assert rig.scheduler.planner.num_jobs == 0
    assert not rig.scheduler.holds
    rig.abort(served)


def test_a_request_comes_in_behind_a_job_of_an_aborted_one(rig: StepRig) -> None:
    rig.run(prompt(1))
    rig.computed.clear()
    one = rig.add(long_prompt())
    rig.step()
    two = rig.add(long_prompt())
    rig.step()
    rig.abort(one)
    rig.finish()
    assert two.finished
    assert max(rig.computed.values()) == 1


def test_ordinary_traffic_goes_on_beside_jobs(rig: StepRig) -> None:
    rig.run(prompt(1))
    decoding = rig.add([10, 11] * 8, num_tokens=20)
    rig.step()
    rig.steps.clear()
    rig.add(long_prompt())
    behind = rig.add([20, 21] * 8)
    rig.finish()
    assert all(decoding.request.request_id in step for step in rig.steps[:3])
    # First come, first served: with the last of the document, not after its answer.
    assert behind.request.request_id in rig.steps[2]


def test_a_job_becomes_as_urgent_as_the_most_urgent_request_that_waits(folder: Path) -> None:
    rig = StepRig(folder, scheduling_policy="priority", max_num_seqs=1)
    rig.run(prompt(1))
    late = rig.add(prompt(5, 6, 1), priority=9)
    rig.step()  # the first job of `late`; the one for document 6 is in the queue
    others = [rig.add([20 + i, 30 + i] * 8, priority=5) for i in range(4)]
    urgent = rig.add(prompt(6, 1), priority=0)
    rig.finish()
    rig.assert_idle()
    first = [one.first_step for one in (urgent, *others, late)]
    assert all(step is not None for step in first)
    assert first == sorted(first)  # type: ignore[type-var]
    assert max(rig.computed[block] for block in span_blocks(rig, range(5, 7))) == 1


def test_jobs_run_while_a_grammar_is_compiled(rig: StepRig) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    rig.run(prompt(1))
    rig.steps.clear()
    served = rig.add(
        prompt(2, 1), sampling={"structured_outputs": StructuredOutputsParams(choice=["a", "b"])}
    )
    rig.step()
    assert jobs(rig.steps[0]) == [SPAN]
    assert served.request.request_id not in rig.steps[0]
    rig.abort(served)


@pytest.mark.parametrize("policy", ["interleaved", "batched", "in_place"])
@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_a_prompt_is_hashed_when_its_turn_comes(folder: Path, policy: str, order: str) -> None:
    """Not by the thread that takes requests in; an ordinary one is, by vLLM."""
    rig = StepRig(folder, policy, scheduling_policy=order, max_num_seqs=1)
    prompts = [prompt(1), prompt(2, 1), [20, 30] * 24, span(4)[: BLOCK_SIZE + 5]]
    waiting = [rig.add(one, num_tokens=20) for one in prompts]
    ordinary = [SSEP not in one for one in prompts]
    assert [bool(one.request.block_hashes) for one in waiting] == ordinary
    rig.step()
    if policy != "batched":
        assert [bool(one.request.block_hashes) for one in waiting[1:]] == ordinary[1:]
    rig.finish()
    rig.assert_idle()
    for one, token_ids in zip(waiting, prompts, strict=True):
        hashes = rig.hashes(token_ids)
        assert one.request.block_hashes[: len(hashes)] == hashes
        assert len(one.request.block_hashes) == (len(token_ids) + 20) // BLOCK_SIZE


@pytest.mark.parametrize(
    ("token_ids", "options"),
    [([10, SSEP, 11] * 16, None), ([10] * 16, SpanOptions(places=((16, 99),)))],
)
@pytest.mark.parametrize("policy", ["interleaved", "batched"])
def test_what_the_front_end_would_have_refused_ends_with_an_error(
    rig: StepRig, token_ids: list[int], options: SpanOptions | None, policy: Any
) -> None:
    """A request made by hand does not pass there; an error here would end the engine."""
    rig.scheduler.planner.policy = policy
    others = [rig.add(prompt(1), num_tokens=3)]
    refused = rig.add(token_ids, options)
    others.append(rig.add(prompt(2, 1)))
    rig.finish()
    assert refused.finished
    assert not refused.tokens
    assert refused.request.status == RequestStatus.FINISHED_ERROR
    assert not any(refused.request.request_id in step for step in rig.steps)
    assert [len(one.tokens) for one in others] == [3, 1]


def test_a_prompt_that_cannot_be_read_ends_with_an_error(
    rig: StepRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong there: other requests go on."""
    read = rig.hasher.read

    def broken(request: Any) -> Any:
        if request.request_id == "broken":
            raise TypeError("no such thing")
        return read(request)

    monkeypatch.setattr(rig.hasher, "read", broken)
    refused = rig.add(prompt(1), name="broken")
    other = rig.add(prompt(2, 1))
    rig.finish()
    assert refused.request.status == RequestStatus.FINISHED_ERROR
    assert len(other.tokens) == 1


def test_a_prompt_that_is_streamed_in_is_never_scheduled(rig: StepRig) -> None:
    refused = rig.add(prompt(1), resumable=True)
    assert refused.request.abort_immediately
    rig.abort(refused)


def test_ids_of_internal_requests_are_not_for_others(rig: StepRig) -> None:
    forged = rig.add(prompt(1), name=f"{JOB_PREFIX}7")
    assert forged.request.abort_immediately
    rig.abort(forged)


# ---- memory -----------------------------------------------------------------------------------


def test_what_is_cached_is_held_while_a_request_waits(folder: Path) -> None:
    """The pool has room for the request and little more: its job would evict its own hits."""
    for hold_share, kept in ((1.0, True), (0.0, False)):
        rig = StepRig(folder, num_blocks=82, hold_share=hold_share, max_model_len=1280)
        rig.run(prompt(1))
        rig.run([10, 11] * 580)  # evicts everything that is older, but for one block
        rig.run(prompt(1))
        rig.steps.clear()
        served = rig.add(long_prompt())
        rig.finish()
        rig.assert_idle()
        assert served.figures is not None
        assert (served.figures["hit_tokens"] == 3 * BLOCK_SIZE) is kept or not kept


def test_a_block_is_held_once_for_a_request(rig: StepRig) -> None:
    rig.run(prompt(1))
    holds, request = rig.scheduler.holds, "a request"
    blocks = rig.scheduler.block_cache.leading(rig.hashes(prompt(1)))
    assert holds.add(request, blocks[:3])
    assert holds.add(request, blocks)
    assert holds.add("another", blocks[:1])
    assert [block.ref_cnt for block in blocks] == [2, *[1] * (len(blocks) - 1)]
    assert holds.num_blocks == len(blocks) + 1
    holds.release(request)
    holds.release("another")


def test_a_second_round_holds_what_the_first_held(folder: Path) -> None:
    rig = StepRig(folder)
    rig.run(prompt(1))
    served = rig.add(long_prompt())
    rig.step()
    holds, planner = rig.scheduler.holds, rig.scheduler.planner
    (job,) = planner.jobs_of(served.request.request_id)
    num_held = holds.num_blocks
    assert num_held == 2 + 3  # the prefix and document 1
    planner._make_jobs(planner.plan_of(served.request.request_id))
    assert holds.num_blocks == num_held
    assert planner.jobs_of(served.request.request_id) == [job]
    rig.finish()
    rig.assert_idle()


def test_holds_are_given_back_before_anybody_goes_short(folder: Path) -> None:
    """The request alone needs 77 blocks. Beside the other one, its job and its hold are too much:
    the hold goes, and the request waits for memory and computes what was evicted in place."""
    rig = StepRig(folder, num_blocks=78, hold_share=1.0, max_model_len=1248)
    rig.run(prompt(1))
    decoding = rig.add([10, 11] * 31, num_tokens=10)
    rig.step()
    waiting = rig.add(long_prompt())
    rig.step()
    assert rig.scheduler.planner.num_jobs == 1
    assert rig.scheduler.holds.num_released_early == 1
    rig.finish()
    assert decoding.request.num_preemptions == 0
    assert len(decoding.tokens) == 10
    assert waiting.finished
    rig.assert_idle()


def test_reset_forgets_what_is_held(rig: StepRig) -> None:
    rig.run(prompt(1))
    served = rig.add(long_prompt())
    rig.step()
    assert not rig.scheduler.reset_prefix_cache()  # its job is running
    assert not rig.scheduler.holds
    rig.finish()
    assert served.finished


def test_blocks_of_a_step_that_a_preemption_takes_back_are_not_published(folder: Path) -> None:
    """vLLM publishes blocks when it schedules them, and by priority preempts a request that it has
    just scheduled."""
    rig = StepRig(
        folder,
        num_blocks=10,
        scheduling_policy="priority",
        long_prefill_token_threshold=32,
        max_model_len=160,
    )
    rig.add([30] * 4, priority=8)  # a lone request would get the whole step
    slow = rig.add([10 + i for i in range(144)], priority=9)  # 9 blocks, two in each step
    rig.step()
    rig.add([20] * 31, priority=0, num_tokens=40)  # needs a third block in the fourth step
    for _ in range(3):
        rig.step()
    assert slow.request.num_preemptions == 1
    assert len(rig.scheduler.block_cache.leading(slow.request.block_hashes)) == 6
    rig.finish()
    rig.assert_idle()


# ---- what the outside sees --------------------------------------------------------------------


def test_internal_requests_are_in_no_list_of_finished_ones(folder: Path) -> None:
    rig = StepRig(folder)
    rig.scheduler.finished_req_ids_dict = {0: set()}
    rig.run(prompt(1))
    rig.scheduler.finished_req_ids_dict[0] = set()
    rig.add(prompt(2, 1))
    output = rig.scheduler.schedule()
    assert jobs(output.num_scheduled_tokens)
    results = rig._execute(output)
    (of_client,) = rig.scheduler.update_from_output(output, results).values()
    assert of_client.finished_requests == {"request-1"}
    assert [one.request_id for one in of_client.outputs] == ["request-1"]


def test_statistics_count_requests_not_jobs(folder: Path) -> None:
    rig = StepRig(folder, log_stats=True)
    rig.run(prompt(1))
    rig.scheduler.kv_cache_manager.make_prefix_cache_stats()
    rig.add(prompt(2, 1))
    output = rig.scheduler.schedule()
    assert jobs(output.num_scheduled_tokens)
    stats = rig.scheduler.kv_cache_manager.make_prefix_cache_stats()
    assert stats.requests == 1
    assert stats.queries == len(prompt(2, 1))
    assert stats.hits == (2 + 3) * BLOCK_SIZE  # document 2 was computed for it
    rig.scheduler.update_from_output(output, rig._execute(output))
    rig.add(long_prompt())
    rig.step()
    stats = rig.scheduler.make_stats()
    assert counts(stats) == (0, 1, 0)
    rig.finish()


def counts(stats: Any) -> tuple[int, int, int]:
    """Requests running, waiting, passed over."""
    return stats.num_running_reqs, stats.num_waiting_reqs, stats.num_skipped_waiting_reqs


def test_jobs_are_counted_in_no_queue(folder: Path) -> None:
    rig = StepRig(folder, log_stats=True, max_num_seqs=1, max_num_batched_tokens=64)
    rig.run(prompt(1))
    rig.add(prompt(2, 3, 1))
    for _ in range(2):
        rig.add([10, 11] * 8)
    rig.step()  # one job runs, and would not leave a row for another
    assert rig.scheduler.planner.num_jobs == 1
    assert counts(rig.scheduler.make_stats()) == (0, 3, 0)
    assert len(rig.scheduler.waiting) == 4
    rig.finish()
    assert counts(rig.scheduler.make_stats()) == (0, 0, 0)


def test_jobs_that_are_passed_over_are_not_counted_either(folder: Path) -> None:
    rig = StepRig(folder, log_stats=True, long_prefill_token_threshold=64)
    long = prefix(num_blocks=10)
    rig.run([*long, *span(1), *dependent()])
    blocks = rig.scheduler.block_cache.leading(rig.hashes(long))
    rig.pool.evict_blocks({block.block_id for block in blocks})
    rig.add([30] * 4)  # a lone request would get the whole step
    rig.add([*long, *span(2), *span(1), *dependent()])
    rig.step()  # a job for the prefix runs, one for document 2 waits for it
    assert rig.scheduler.planner.num_jobs == 2
    assert len(rig.scheduler.deferred_waiting) == 2
    assert counts(rig.scheduler.make_stats()) == (0, 0, 1)
    rig.finish()
    assert counts(rig.scheduler.make_stats()) == (0, 0, 0)


def test_nothing_is_counted_where_nobody_asks(rig: StepRig) -> None:
    rig.run(prompt(1))
    rig.run(prompt(2, 1))
    assert not rig.scheduler.span_counts._counts


def test_a_scheduler_that_fails_to_start_leaves_the_hasher_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine import core

    from minipic_backend.plugin import seams

    stock = core.get_request_block_hasher

    def fail(*args: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(seams, "adapt_stored_events", fail)
    with pytest.raises(RuntimeError, match="no room"):
        StepRig(folder)
    assert core.get_request_block_hasher is stock


def test_dropped_request_leaves_figures_nowhere(rig: StepRig) -> None:
    served = rig.add(prompt(1), num_tokens=50)
    rig.step()
    assert served.request.request_id in rig.scheduler.span_figures
    rig.abort(served)
