"""The fake engine keeps the engine's manners, so that users' tests against it mean something."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from minipic_backend import (
    ConfigurationError,
    ContextWindowError,
    EngineClosedError,
    EngineProtocol,
    Message,
    Prompt,
    PromptError,
    RequestAbortedError,
    Span,
    Text,
)
from minipic_backend.sampling import LAYOUT_OPTIONS, SAMPLING_OPTIONS, split_options
from minipic_backend.testing import FakeEngine

DOCUMENTS = ["The first document.", "The second document.", "The third one."]


def rag(documents: list[str], question: str = "Which?", system: str = "Answer.") -> Prompt:
    spans = [Span(text, rank=rank) for rank, text in enumerate(documents)]
    return Prompt.chat([Message("system", system), Message("user", [*spans, Text(question)])])


def test_is_an_engine() -> None:
    assert isinstance(FakeEngine(), EngineProtocol)


def test_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, minipic_backend.testing as t; t.FakeEngine().generate('x');"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_answers_constant_list_and_function() -> None:
    assert FakeEngine("Yes.").generate("x").text == "Yes."
    engine = FakeEngine(["a", "b"])
    assert [engine.generate("x").text for _ in range(3)] == ["a", "b", "a"]
    assert FakeEngine(lambda prompt: prompt.parts[0].text[::-1]).generate("abc").text == "cba"


def test_answers_of_a_list_keep_its_order() -> None:
    engine = FakeEngine(lambda prompt: prompt.parts[0].text, gather=20)
    prompts = [f"p{index}" for index in range(20)]
    assert [result.text for result in engine.generate(prompts)] == prompts
    assert [result.text for result in asyncio.run(engine.agenerate(prompts))] == prompts
    assert engine.max_concurrency == 20


def test_same_input_gives_the_same_output() -> None:
    first, second = (FakeEngine().generate(rag(DOCUMENTS)) for _ in range(2))
    assert (first.completions, first.usage) == (second.completions, second.usage)


def test_max_tokens_and_stop() -> None:
    engine = FakeEngine("one two three four")
    cut = engine.generate("x", max_tokens=2)
    assert (cut.text, cut.finish_reason, cut.usage.completion_tokens) == ("one two", "length", 2)
    stopped = engine.generate("x", stop=["three", "two th"])
    assert stopped.text == "one "
    assert (stopped.finish_reason, stopped.completions[0].stop_reason) == ("stop", "two th")
    kept = engine.generate("x", stop="two", include_stop_str_in_output=True)
    assert kept.text == "one two"


def test_without_max_tokens_the_answer_is_not_cut() -> None:
    assert FakeEngine("word " * 200).generate("x").finish_reason == "stop"


def test_n_and_logprobs() -> None:
    result = FakeEngine(["a b", "c"]).generate("x", n=3, logprobs=1)
    assert [completion.text for completion in result.completions] == ["a b", "c", "a b"]
    assert [completion.index for completion in result.completions] == [0, 1, 2]
    assert len(result.completions[0].logprobs or ()) == 2
    assert result.usage.completion_tokens == 5


@pytest.mark.parametrize("options", [{}, {"stop": ["two three"]}, {"max_tokens": 1}, {"n": 2}])
def test_a_stream_says_what_generate_says(options: dict[str, object]) -> None:
    whole = FakeEngine("one two three").generate("x", **options)
    chunks = list(FakeEngine("one two three").stream("x", **options))
    for completion in whole.completions:
        mine = [chunk for chunk in chunks if chunk.index == completion.index]
        assert "".join(chunk.text for chunk in mine) == completion.text
        assert [chunk.finish_reason for chunk in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == completion.finish_reason
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage == whole.usage


def test_spans_are_read_in_any_order() -> None:
    engine = FakeEngine()
    cold = engine.generate(rag(DOCUMENTS), late=0).usage
    warm = engine.generate(rag(DOCUMENTS[::-1]), late=0).usage
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == cold.cache_creation_tokens
    assert warm.cache_creation_tokens == 0
    engine.reset_cache()
    assert engine.generate(rag(DOCUMENTS), late=0).usage.cached_tokens == 0


def test_frame_decides_whether_another_system_prompt_reads_them() -> None:
    engine = FakeEngine()
    engine.generate(rag(DOCUMENTS), late=0)
    assert engine.generate(rag(DOCUMENTS, system="Other."), late=0).usage.cached_tokens == 0
    engine.generate(rag(DOCUMENTS), technique="block_attention")
    other = engine.generate(rag(DOCUMENTS, system="New."), technique="block_attention").usage
    assert other.cached_tokens == 16 * len(DOCUMENTS)


def test_a_universal_frame_is_shared_by_system_prompts() -> None:
    engine = FakeEngine(frame="universal", late=0)
    engine.warm(DOCUMENTS)
    rows = engine.explain(rag(DOCUMENTS)).rows
    assert [row.kind for row in rows] == ["prefix", "dependent", *["span"] * 3, "dependent"]
    spans = sum(row.num_tokens for row in rows if row.kind == "span")
    for system, cached in (("One.", spans), ("Other.", rows[0].num_tokens + spans)):
        usage = engine.generate(rag(DOCUMENTS, system=system)).usage
        assert usage.cached_tokens == cached


def test_cache_salt_keeps_tenants_apart() -> None:
    engine = FakeEngine()
    engine.generate(rag(DOCUMENTS), cache_salt="a")
    assert engine.generate(rag(DOCUMENTS), cache_salt="b").usage.cached_tokens == 0


def test_technique_full_has_no_spans() -> None:
    rows = FakeEngine().explain(rag(DOCUMENTS), technique="full").rows
    assert [row.kind for row in rows] == ["prefix"]


def test_explain_shows_late_documents_and_state() -> None:
    engine = FakeEngine()
    assert engine.warm(DOCUMENTS[2:], prompt=rag(DOCUMENTS)).num_computed_tokens == 16
    rows = engine.explain(rag(DOCUMENTS)).rows
    assert [row.kind for row in rows] == ["prefix", "span", "span", "dependent"]
    assert [row.state for row in rows] == ["cold", "warm", "cold", "cold"]  # the best last
    assert rows[-1].preview.startswith(DOCUMENTS[0])
    assert all(row.num_tokens % 16 == 0 for row in rows[:-1])


def test_warmed_documents_are_read() -> None:
    engine = FakeEngine()
    with pytest.raises(PromptError, match="no prefix yet"):
        engine.warm(DOCUMENTS)
    with pytest.raises(PromptError, match="no documents"):
        engine.warm(DOCUMENTS, prompt=Prompt("x"))
    with pytest.raises(ConfigurationError, match="temperature"):
        engine.warm(DOCUMENTS, prompt=rag(["?"]), temperature=0)
    engine.warm(DOCUMENTS, prompt=rag(["?"]))
    assert engine.warm(DOCUMENTS, prompt=rag(["?"]), late=0).num_computed_tokens == 0
    usage = engine.generate(rag(DOCUMENTS), late=0).usage
    assert usage.cached_tokens == 16 * len(DOCUMENTS)
    engine.warm(["Another one."])
    assert engine.generate(rag(["Another one."]), late=0).usage.cached_tokens == 16 + 16


@pytest.mark.parametrize("technique", ["epic_paper", "prompt_cache"])
def test_techniques_that_read_nothing_are_not_warmed(technique: str) -> None:
    with pytest.raises(ConfigurationError, match=technique):
        FakeEngine(technique=technique).warm(DOCUMENTS)
    with pytest.raises(ConfigurationError, match=technique):
        FakeEngine().warm(DOCUMENTS, technique=technique)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("tempreature", "temperature"), ("max_new_tokens", "max_tokens"), ("techniqe", "technique")],
)
def test_unknown_options_are_refused_with_a_hint(name: str, hint: str) -> None:
    engine = FakeEngine()
    for call in (engine.generate, engine.explain, lambda p, **o: list(engine.stream(p, **o))):
        with pytest.raises(ConfigurationError, match=f"{name}.*did you mean '{hint}'"):
            call("x", **{name: 1})
    assert engine.calls == []


@pytest.mark.parametrize(
    "options", [{"technique": "x"}, {"frame": "x"}, {"late": -1}, {"offsets": "x"}]
)
def test_bad_layout_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        FakeEngine().generate("x", **options)


def test_split_options_leaves_out_none() -> None:
    sampling, layout, request = split_options(
        {"temperature": 0.0, "top_p": None, "late": 0, "cache_salt": "s", "stop": None}
    )
    assert (sampling, layout, request) == ({"temperature": 0.0}, {"late": 0}, {"cache_salt": "s"})
    assert not SAMPLING_OPTIONS & LAYOUT_OPTIONS


def test_bad_prompts_are_refused_and_the_engine_goes_on() -> None:
    engine = FakeEngine(max_model_len=50)
    with pytest.raises(ContextWindowError):
        engine.generate("word " * 60)
    with pytest.raises(PromptError):
        engine.warm([3])  # type: ignore[list-item]
    assert engine.generate("word").text


def test_calls_are_recorded() -> None:
    engine = FakeEngine()
    engine.generate("x", temperature=0.5, request_id="mine")
    assert engine.calls[0].options == {"temperature": 0.5, "request_id": "mine"}
    assert (engine.calls[0].request_id, engine.prompts) == ("mine", [Prompt("x")])


def test_abort_from_another_thread() -> None:
    engine = FakeEngine(ttft_s=30)
    threading.Timer(0.05, engine.abort, ["mine"]).start()
    started = time.perf_counter()
    with pytest.raises(RequestAbortedError):
        engine.generate("x", request_id="mine")
    assert time.perf_counter() - started < 1
    assert engine.aborted == ["mine"]
    engine.abort("unknown")


def test_cancelling_a_task_ends_the_request() -> None:
    engine = FakeEngine(ttft_s=30)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.agenerate("x", request_id="mine"), 0.05)

    asyncio.run(main())
    assert engine.aborted == ["mine"]


def test_leaving_a_stream_ends_the_request() -> None:
    engine = FakeEngine("a b c")
    stream = engine.stream("x", request_id="mine")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine.aborted == ["mine"]


def test_close_is_final_and_idempotent() -> None:
    with FakeEngine() as engine:
        engine.generate("x")
    engine.close()
    calls = (
        lambda: engine.generate("x"),
        lambda: next(engine.stream("x")),
        lambda: asyncio.run(engine.agenerate("x")),
        lambda: engine.explain("x"),
        lambda: engine.warm(["x"]),
        lambda: engine.count_tokens("x"),
    )
    for call in calls:
        with pytest.raises(EngineClosedError):
            call()


def test_close_ends_what_runs() -> None:
    engine = FakeEngine(ttft_s=30)
    threading.Timer(0.05, engine.close).start()
    with pytest.raises(EngineClosedError):
        engine.generate("x")


def test_token_ids_join_up() -> None:
    engine = FakeEngine()
    assert engine.count_tokens("one  two\nthree ") == len(engine.token_ids("one  two\nthree ")) == 4
    assert engine.token_ids("a b") == engine.token_ids("a b")
