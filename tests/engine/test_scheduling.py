"""64 requests over 20 documents in a tiny cache: each answer is the one computed alone.

A small model with random weights in float32, stepped by hand, so that arrivals and aborts fall
where the seed says. `test_scheduling_steps.py` looks at the scheduler alone, and closer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from prompts import PromptMaker, join
from tiny_models import save_tiny

from minipic_backend import Engine
from minipic_backend.config import CONFIG_KEY
from minipic_backend.plugin.span_jobs import JOB_PREFIX

NUM_REQUESTS = 64
NUM_DOCUMENTS = 20
TOLERANCE = 1e-4
"""Log-probabilities, float32: batches differ in the shapes of their matrix products."""


@dataclass
class Answer:
    """What came back of one request; `figures` stay None where it was aborted."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    figures: dict[str, Any] | None = None


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    num_tokens: int
    documents: tuple[int, ...]


@pytest.fixture(scope="module")
def rig(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from rig import Rig

    folder = save_tiny(
        tmp_path_factory.mktemp("tiny"), model, "llama", hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    )  # fmt: skip
    with Engine(
        folder,
        dtype="float32",
        max_model_len=512,
        max_num_batched_tokens=256,
        max_num_seqs=12,
        kv_cache_gib=0.0625,
    ) as engine:
        yield Rig(engine._driver, engine)


class Traffic:
    """Requests of one seed, played on the engine's thread."""

    def __init__(self, rig: Any, seed: int) -> None:
        self._rig = rig
        self._rng = random.Random(seed)
        self._make = PromptMaker(rig.engine.tokenizer, rig.config)
        self.spans = self._make.spans(NUM_DOCUMENTS)
        self.asked = [self._ask(number) for number in range(NUM_REQUESTS)]

    def _ask(self, number: int) -> Asked:
        documents = self._rng.sample(range(NUM_DOCUMENTS), self._rng.randint(1, 4))
        spans = [self.spans[i] for i in documents]
        question = self._make.question(f"Question {number}?")
        prompt = join(self._make.prefix(), *spans, question)
        return Asked(tuple(prompt), self._rng.choice([1, 1, 3, 6]), tuple(documents))

    def alone(self) -> list[Answer]:
        """Each request by itself, with nothing cached."""
        found = []
        for asked in self.asked:
            self._rig.reset()
            (answer,) = self._play([asked], abort=0.0)
            found.append(answer)
        return found

    def together(self, *, abort: float) -> list[Answer]:
        """All of them; a share of the steps aborts one."""
        return self._play(self.asked, abort=abort)

    def _play(self, asked: Sequence[Asked], *, abort: float) -> list[Answer]:
        return self._rig.driver.call(  # type: ignore[no-any-return]
            lambda llm: self._on_engine(llm, asked, abort)
        )

    def _on_engine(self, llm: Any, asked: Sequence[Asked], abort: float) -> list[Answer]:
        answers = [Answer() for _ in asked]
        waiting = list(enumerate(asked))
        live: set[int] = set()
        while waiting or live:
            while waiting and (self._rng.random() < 0.6 or not live):
                number, one = waiting.pop(0)
                params = self._rig.params(num_tokens=one.num_tokens, logprobs=5)
                (prompt,) = llm.renderer.render_cmpl([{"prompt_token_ids": list(one.prompt)}])
                llm.add_request(str(number), prompt, params)
                live.add(number)
            if live and self._rng.random() < abort:
                number = self._rng.choice(sorted(live))
                llm.abort_request([str(number)])
                live.remove(number)
            for output in llm.step():
                answer = answers[int(output.request_id)]
                (completion,) = output.outputs
                answer.tokens += completion.token_ids
                answer.logprobs += [
                    {token: entry.logprob for token, entry in position.items()}
                    for position in completion.logprobs
                ]
                if output.finished:
                    live.discard(int(output.request_id))
                    answer.figures = (output.kv_transfer_params or {}).get(CONFIG_KEY)
        while llm.engine_core.engine_core.scheduler.has_requests():
            llm.step()
        return answers


def assert_equal(got: Answer, want: Answer) -> None:
    assert got.tokens == want.tokens[: len(got.tokens)]
    for ours, theirs in zip(got.logprobs, want.logprobs, strict=False):
        assert ours.keys() == theirs.keys()
        assert max(abs(ours[token] - theirs[token]) for token in ours) <= TOLERANCE


@pytest.mark.parametrize("seed", range(5))
def test_every_answer_is_the_one_computed_alone(
    rig: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """28 blocks: two or three requests at a time. A prompt and its answer need up to 12. With every
    other seed as on CUDA, where jobs are made for the pads that they leave out, too."""
    monkeypatch.setattr(rig.scheduler, "_tail_jobs", seed % 2 == 1)
    traffic = Traffic(rig, seed)
    alone = traffic.alone()
    rig.reset()
    free = rig.num_free_blocks()
    with rig.shrunk(28), rig.watched() as steps:
        answers = traffic.together(abort=0.15)
    assert rig.num_free_blocks() == free
    rig.assert_idle()
    assert any(name.startswith(JOB_PREFIX) for step in steps.jobs for name in step)
    num_finished = 0
    for got, want, asked in zip(answers, alone, traffic.asked, strict=True):
        assert_equal(got, want)
        if got.figures is not None:
            num_finished += 1
            assert len(got.tokens) == asked.num_tokens
    assert NUM_REQUESTS // 2 < num_finished < NUM_REQUESTS


def test_with_room_every_document_is_computed_once(rig: Any) -> None:
    traffic = Traffic(rig, 7)
    rig.reset()
    answers = traffic.together(abort=0.0)
    used = {number for asked in traffic.asked for number in asked.documents}
    computed = sum(len(traffic.spans[number]) for number in used)
    figures = [answer.figures for answer in answers]
    assert all(one is not None for one in figures)
    assert sum(one["computed_tokens"] for one in figures if one is not None) == computed
