"""Many callers at once on one embedded model."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_minipic import ChatMiniPIC
from langchain_model import model_params
from ticker import watch

MAX_STALL_S = 0.050


@pytest.fixture(scope="module")
def llm() -> ChatMiniPIC:
    return ChatMiniPIC(**model_params(max_tokens=2))


@pytest.fixture(scope="module")
def engine(llm: ChatMiniPIC) -> Any:
    return llm._get_engine()


@pytest.fixture
def small_heap() -> Iterator[None]:
    """What other tests left in this process is out of the garbage collector's way: walking it
    takes longer than anything that is measured here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def question(number: int) -> str:
    """Each of another length."""
    return "Say something. " + "word " * (number % 50)


def forced(number: int) -> dict[str, Any]:
    """The one right answer to a question: a token of its own, twice."""
    return {"allowed_token_ids": [1000 + number], "ignore_eos": True}


def check(engine: Any, llm: ChatMiniPIC, answers: list[AIMessage]) -> None:
    """Everybody got the answer to his own question."""
    lengths = {n: len(llm.explain(question(n)).token_ids) for n in range(50)}
    for number, answer in enumerate(answers):
        assert answer.content == engine.tokenizer.decode([1000 + number] * 2)
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_tokens"] == lengths[number % 50]


@contextmanager
def batch_sizes(engine: Any) -> Iterator[list[int]]:
    """Requests in each step of the engine."""
    sizes: list[int] = []
    scheduler = engine._driver.llm.engine_core.engine_core.scheduler

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = type(scheduler).schedule(scheduler, *args, **kwargs)
        sizes.append(len(output.num_scheduled_tokens))
        return output

    engine._driver.call(lambda _: setattr(scheduler, "schedule", schedule))
    try:
        yield sizes
    finally:
        engine._driver.call(lambda _: delattr(scheduler, "schedule"))


def test_32_threads(llm: ChatMiniPIC, engine: Any) -> None:
    with ThreadPoolExecutor(32) as pool:
        numbers = range(64)
        answers = list(pool.map(lambda n: llm.invoke(question(n), **forced(n)), numbers))
    check(engine, llm, answers)


@pytest.mark.usefixtures("small_heap")
def test_200_ainvoke_leave_the_event_loop_free(llm: ChatMiniPIC, engine: Any) -> None:
    async def main() -> tuple[list[AIMessage], Any]:
        calls = (llm.ainvoke(question(n), **forced(n)) for n in range(200))
        return await watch(asyncio.gather(*calls))

    worst = []
    for _ in range(3):  # a busy machine may hold up the loop alone, but not every time
        answers, stalls = asyncio.run(main())
        check(engine, llm, answers)
        worst.append(stalls.worst_s)
        if worst[-1] <= MAX_STALL_S:
            return
    pytest.fail(f"The loop stood still for {[round(1e3 * one) for one in worst]} ms")


def test_batch_of_64_runs_concurrently_in_the_engine(llm: ChatMiniPIC, engine: Any) -> None:
    with batch_sizes(engine) as sizes:
        answers = llm.batch([question(n) for n in range(64)], max_tokens=20, ignore_eos=True)
    assert len(answers) == 64
    assert max(sizes) >= 56  # the first may be done before the last has been laid out
    with batch_sizes(engine) as sizes:
        asyncio.run(llm.abatch([question(n) for n in range(64)], max_tokens=20, ignore_eos=True))
    assert max(sizes) >= 56
