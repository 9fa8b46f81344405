"""Aborts, closing, threads: nothing hangs, nothing is left behind."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from check import assert_same
from prompts import PromptMaker, passages

from minipic_backend import (
    Engine,
    EngineClosedError,
    EngineError,
    Prompt,
    RequestAbortedError,
    Span,
    Text,
)

LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0}


def ask(number: int = 0, question: str = "Summarize.") -> Prompt:
    spans = [Span(text) for text in passages()[number : number + 3]]
    return Prompt([Text("Documents:\n"), *spans, Text(question)])


@pytest.fixture
def engine(exact_rig: Any) -> Iterator[Engine]:
    exact_rig.assert_idle()
    free = exact_rig.num_free_blocks()
    yield exact_rig.engine
    exact_rig.assert_idle()
    assert exact_rig.num_free_blocks() == free


def test_closing_a_stream_aborts_its_request(engine: Engine, exact_rig: Any) -> None:
    stream = engine.stream(ask(), **LONG)
    first = next(stream)
    assert first.token_ids
    assert exact_rig.call(lambda: len(exact_rig.scheduler.requests)) == 1
    stream.close()
    exact_rig.assert_idle(timeout=2.0)


def test_leaving_a_loop_over_a_stream_aborts_its_request(engine: Engine, exact_rig: Any) -> None:
    for count, _ in enumerate(engine.stream(ask(), **LONG)):
        if count == 2:
            break
    exact_rig.assert_idle(timeout=2.0)


def test_an_unread_stream_costs_nothing(engine: Engine, exact_rig: Any) -> None:
    engine.stream(ask(), **LONG).close()
    exact_rig.assert_idle(timeout=2.0)


def test_abort_by_id(engine: Engine, exact_rig: Any) -> None:
    stream = engine.stream(ask(), request_id="mine", **LONG)
    assert next(stream).request_id == "mine"
    engine.abort("mine")
    with pytest.raises(RequestAbortedError, match="mine"):
        list(stream)
    engine.abort("mine")
    engine.abort("never heard of")
    exact_rig.assert_idle(timeout=2.0)


def test_abort_while_waiting(engine: Engine, exact_rig: Any) -> None:
    with exact_rig.paused():
        handle = exact_rig.driver.submit([10] * 40, exact_rig.params(num_tokens=50))
        exact_rig.driver.abort(handle.request_id)
    with pytest.raises(RequestAbortedError):
        list(handle.deltas())


def test_abort_of_several_completions(engine: Engine, exact_rig: Any) -> None:
    stream = engine.stream(ask(), n=3, **LONG | {"temperature": 1.0})
    next(stream)
    stream.close()
    exact_rig.assert_idle(timeout=2.0)


def test_an_id_is_free_again_once_its_request_is_over(engine: Engine) -> None:
    for _ in range(2):
        answer = engine.generate("Hello", request_id="again", max_tokens=2, temperature=0.0)
        assert answer.request_id == "again"


def test_a_failing_prompt_of_a_list_leaves_none_running(engine: Engine, exact_rig: Any) -> None:
    with pytest.raises(ValueError, match="not int"):
        engine.generate([ask(), 3], **LONG)  # type: ignore[list-item]
    exact_rig.assert_idle(timeout=2.0)


def test_aborting_one_of_a_list_aborts_the_rest(engine: Engine, exact_rig: Any) -> None:
    def abort_first() -> None:
        while not exact_rig.driver._handles:
            time.sleep(0.005)
        engine.abort(next(iter(exact_rig.driver._handles)))

    thread = threading.Thread(target=abort_first)
    thread.start()
    with pytest.raises(RequestAbortedError):
        engine.generate([ask(0), ask(1), ask(2)], **LONG)
    thread.join()
    exact_rig.assert_idle(timeout=2.0)


def test_many_threads_at_once(engine: Engine, exact_rig: Any) -> None:
    """32 threads, each with questions of its own; every one gets its own answer."""
    options = {"technique": "block_attention", "max_tokens": 4, "temperature": 0.0}
    prompts = [ask(number % 8, f"Say the number {number}.") for number in range(32)]
    alone = [engine.generate(prompt, **options).token_ids for prompt in prompts]
    barrier = threading.Barrier(len(prompts))

    def one(prompt: Prompt) -> tuple[tuple[int, ...], tuple[int, ...]]:
        barrier.wait()
        whole = engine.generate(prompt, **options).token_ids
        pieces = [token for c in engine.stream(prompt, **options) for token in c.token_ids]
        return whole, tuple(pieces)

    with exact_rig.watched() as steps, ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(one, prompts))
    assert steps.largest_batch > 8
    assert [whole for whole, _ in together] == alone
    assert [pieces for _, pieces in together] == alone
    # vLLM tells the runner of finished requests in the next step; then it remembers none of them.
    engine.generate("Hello", max_tokens=1)
    assert len(exact_rig.runner.span_tables) <= 1


def test_engines_of_one_process_at_once(rigs: Any) -> None:
    """Each on a thread of its own, and vLLM's layers look things up in one place for all."""
    both = [rigs.get("float32", encoding) for encoding in ("span_local", "unrotated")]
    makers = [PromptMaker(rig.engine.tokenizer, rig.config) for rig in both]
    alone = [rig.run(make.usual(3), num_tokens=4) for rig, make in zip(both, makers, strict=True)]

    def run(rig: Any, make: PromptMaker) -> list[Any]:
        found = []
        for number in range(4):
            rig.run(make.usual(3, first=40 + 3 * number))
            found.append(rig.run(make.usual(3), num_tokens=4))
        return found

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(run, both, makers))
    for rig, want, found in zip(both, alone, together, strict=True):
        for answer in found:
            assert_same(rig, answer, want)


def test_reset_cache_keeps_running_requests(engine: Engine) -> None:
    engine.reset_cache()
    first = engine.generate(ask(), max_tokens=1, temperature=0.0).usage
    again = engine.generate(ask(), max_tokens=1, temperature=0.0).usage
    assert (first.cached_tokens, again.cached_tokens) == (0, again.prompt_tokens // 32 * 32)
    engine.reset_cache()
    assert engine.generate(ask(), max_tokens=1, temperature=0.0).usage.cached_tokens == 0
    stream = engine.stream(ask(), **LONG)
    next(stream)
    with pytest.raises(EngineError, match="in use"):
        engine.reset_cache()
    assert next(stream).token_ids
    stream.close()


# ---- closing --------------------------------------------------------------------------------


@pytest.fixture
def another(tiny_model: str) -> Iterator[Engine]:
    """An engine to close, beside the session's."""
    with Engine(tiny_model, max_model_len=1024, kv_cache_gib=0.05) as engine:
        yield engine


def test_closing(request: pytest.FixtureRequest, model: str, engine: Engine) -> None:
    """Requests under way fail, later ones are refused, a second close is nothing, and the other
    engine of this process works on."""
    another = Engine(model, max_model_len=1024, kv_cache_gib=0.05)
    request.addfinalizer(another.close)
    want = engine.generate(ask(), max_tokens=4, temperature=0.0).token_ids
    streams = [another.stream(ask(number), **LONG) for number in range(3)]
    for stream in streams:
        next(stream)
    failures: list[BaseException] = []

    def blocked() -> None:
        try:
            another.generate(ask(9), **LONG)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=blocked)
    thread.start()
    time.sleep(0.1)
    another.close()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert [type(error) for error in failures] == [EngineClosedError]
    for stream in streams:
        with pytest.raises(EngineClosedError):
            list(stream)
    another.close()
    for call in (
        lambda: another.generate("Hello"),
        lambda: next(another.stream("Hello")),
        lambda: another.warm(["A document."], technique="block_attention"),
        lambda: another.explain(ask()),
        another.reset_cache,
    ):
        with pytest.raises(EngineClosedError):
            call()
    another.abort("whatever")
    assert "closed" in repr(another)
    assert gc.get_freeze_count()  # its heap stays out of the garbage collector's way
    assert engine.generate(ask(), max_tokens=4, temperature=0.0).token_ids == want


def test_closing_from_many_threads(another: Engine) -> None:
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(another.close) for _ in range(8)]:
            done.result(timeout=20)


def test_with_statement_closes(tiny_model: str) -> None:
    with Engine(tiny_model, max_model_len=512, kv_cache_gib=0.05) as engine:
        engine.generate("Hello", max_tokens=1)
    with pytest.raises(EngineClosedError):
        engine.generate("Hello")


def test_engine_that_nobody_holds_any_more_is_closed(tiny_model: str) -> None:
    engine = Engine(tiny_model, max_model_len=512, kv_cache_gib=0.05)
    driver = engine._driver
    engine.generate("Hello", max_tokens=1)
    del engine
    gc.collect()
    deadline = time.monotonic() + 10
    while not driver.closed and time.monotonic() < deadline:
        time.sleep(0.05)
    assert driver.closed
    driver._thread.join(timeout=10)
    assert not driver._thread.is_alive()


def test_a_failed_start_leaves_the_others_alone(model: str, engine: Engine) -> None:
    from minipic_backend import EngineStartError

    with pytest.raises(EngineStartError):
        Engine(model, kv_cache_gib=0.001)
    assert engine.generate("Hello", max_tokens=2).usage.completion_tokens == 2


def test_a_step_that_fails_ends_the_engine_and_says_why(
    another: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = another._driver.llm.engine_core.engine_core

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("as if something broke")

    monkeypatch.setattr(core.model_executor, "execute_model", fail)
    with pytest.raises(EngineError, match="as if something broke") as caught:
        another.generate(ask(), max_tokens=2)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(EngineClosedError):
        another.generate(ask(), max_tokens=2)
    another.close()
