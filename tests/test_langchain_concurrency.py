"""Many prompts at once, event loops, timeouts."""

from __future__ import annotations

import asyncio
import time

import pytest
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_minipic import ChatMiniPIC, SpanPromptTemplate
from langchain_support import ANSWER, DOCUMENTS, collect

from minipic_backend import (
    Prompt,
)
from minipic_backend.testing import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(ANSWER)


@pytest.fixture
def llm(engine: FakeEngine) -> ChatMiniPIC:
    return ChatMiniPIC(model="m", engine=engine)


@pytest.fixture
def prompt() -> SpanPromptTemplate:
    return SpanPromptTemplate.from_messages(
        [("system", "Answer from the documents."), ("human", "{context}\n\nQuestion: {question}")]
    )


def test_batch_runs_in_the_engine_at_once() -> None:
    engine = FakeEngine(lambda p: p.messages[-1].parts[0].text.upper(), gather=64)
    llm = ChatMiniPIC(model="m", engine=engine)
    texts = [f"q{index}" for index in range(64)]
    answers = llm.batch(texts)
    assert [answer.content for answer in answers] == [text.upper() for text in texts]
    assert engine.max_concurrency == 64

    bounded = FakeEngine(ttft_s=0.02)
    ChatMiniPIC(model="m", engine=bounded).batch(texts[:8], {"max_concurrency": 2})
    assert bounded.max_concurrency == 2


def test_every_way_to_ask_at_once_is_concurrent() -> None:
    texts = [f"q{index}" for index in range(20)]
    lists: list[list[BaseMessage]] = [[HumanMessage(text)] for text in texts]

    def engine() -> tuple[FakeEngine, ChatMiniPIC]:
        fake = FakeEngine(lambda p: p.messages[-1].parts[0].text.upper(), gather=20)
        return fake, ChatMiniPIC(model="m", engine=fake)

    expected = [text.upper() for text in texts]
    fake, llm = engine()
    assert [m.content for m in asyncio.run(llm.abatch(texts))] == expected
    assert fake.max_concurrency == 20
    fake, llm = engine()
    result = llm.generate(lists)
    assert [row[0].text for row in result.generations] == expected
    assert len(result.run or []) == 20
    assert fake.max_concurrency == 20
    fake, llm = engine()
    completed = dict(llm.batch_as_completed(texts))
    assert [completed[index].content for index in range(20)] == expected
    assert fake.max_concurrency == 20


def test_batch_returns_exceptions_in_place() -> None:
    def answer(prompt: Prompt) -> str:
        if prompt.messages[-1].parts[0].text == "bad":
            raise ValueError("bad one")
        return "ok"

    llm = ChatMiniPIC(model="m", engine=FakeEngine(answer))
    good, bad, last = llm.batch(["a", "bad", "b"], return_exceptions=True)
    assert (good.content, last.content) == ("ok", "ok")
    assert isinstance(bad, ValueError)


def test_the_event_loop_is_not_blocked(prompt: SpanPromptTemplate) -> None:
    engine = FakeEngine(ANSWER, ttft_s=0.3, token_s=0.02)
    llm = ChatMiniPIC(model="m", engine=engine)
    chain = prompt | llm
    values = {"context": DOCUMENTS * 10, "question": "Who?"}

    async def main() -> float:
        worst, done = 0.0, False

        async def tick() -> None:
            nonlocal worst
            while not done:
                before = time.perf_counter()
                await asyncio.sleep(0.005)
                worst = max(worst, time.perf_counter() - before - 0.005)

        async def stream() -> str:
            return "".join([str(chunk.content) async for chunk in chain.astream(values)])

        ticker = asyncio.create_task(tick())
        await asyncio.sleep(0)
        answers = await asyncio.gather(
            stream(), llm.awarm(DOCUMENTS, prompt), *(chain.ainvoke(values) for _ in range(8))
        )
        done = True
        await ticker
        assert answers[0] == answers[-1].content == ANSWER
        return worst

    # A busy machine may hold up any process for a moment, but not every time.
    assert any(asyncio.run(main()) < 0.05 for _ in range(3))


def test_asyncio_run_twice(llm: ChatMiniPIC) -> None:
    for _ in range(2):
        assert asyncio.run(llm.ainvoke("x")).content == ANSWER


@pytest.mark.parametrize("asynchronous", [False, True])
def test_timeout_aborts(asynchronous: bool) -> None:
    engine = FakeEngine(ttft_s=30)
    llm = ChatMiniPIC(model="m", engine=engine, timeout=0.05)
    started = time.perf_counter()
    calls = [
        lambda: asyncio.run(llm.ainvoke("x")) if asynchronous else llm.invoke("x"),
        lambda: collect(llm.astream("x")) if asynchronous else list(llm.stream("x")),
    ]
    for call in calls:
        with pytest.raises(TimeoutError, match=r"timeout=0\.05"):
            call()
    assert time.perf_counter() - started < 2
    assert len(engine.aborted) == 2
    patient = ChatMiniPIC(model="m", engine=FakeEngine(ANSWER), timeout=30)
    assert patient.invoke("x").content == ANSWER
