"""What comes back: completions, stop strings, seeds, usage; whole, streamed and in batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prompts import passages

from minipic_backend import Chunk, Engine, Message, Prompt, Span, Text

GREEDY = {"max_tokens": 12, "temperature": 0.0}


def ask(question: str = "What is this about?") -> Prompt:
    spans = [Span(text, rank=rank) for rank, text in enumerate(passages()[:3])]
    return Prompt.chat([Message("user", [*spans, Text(question)])])


@pytest.fixture
def engine(exact_rig: Any) -> Iterator[Engine]:
    yield exact_rig.engine
    exact_rig.assert_idle()


def joined(chunks: list[Chunk], index: int = 0) -> tuple[str, tuple[int, ...]]:
    mine = [chunk for chunk in chunks if chunk.index == index]
    return "".join(c.text for c in mine), tuple(token for c in mine for token in c.token_ids)


def test_stream_says_what_generate_says(engine: Engine) -> None:
    whole = engine.generate(ask(), logprobs=2, **GREEDY)
    chunks = list(engine.stream(ask(), logprobs=2, **GREEDY))
    assert len(chunks) > 3
    assert joined(chunks) == (whole.text, whole.token_ids)
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]
    assert all(chunk.usage is None and chunk.timing is None for chunk in chunks[:-1])
    assert chunks[-1].usage is not None
    assert chunks[-1].timing is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    logprobs = [entry for chunk in chunks for entry in chunk.logprobs or ()]
    assert len(logprobs) == 12
    assert [set(entry) for entry in logprobs] == [
        set(e) for e in whole.completions[0].logprobs or ()
    ]


def test_a_list_says_what_each_says(engine: Engine) -> None:
    prompts: list[Prompt | str] = [ask(), "Generators are", ask("How many documents are there?")]
    together = engine.generate(prompts, **GREEDY)
    assert [a.token_ids for a in together] == [
        engine.generate(p, **GREEDY).token_ids for p in prompts
    ]
    assert engine.generate([], **GREEDY) == []


@pytest.mark.parametrize("keep", [False, True])
def test_stop_strings_are_the_same_in_stream_and_whole(engine: Engine, keep: bool) -> None:
    """The string lies across tokens, so that a stream must hold text back."""
    full = engine.generate("The first ten numbers are", max_tokens=30, temperature=0.0).text
    middle = len(full) // 2
    stop = full[middle : middle + 6]
    assert full.count(stop) >= 1
    options = {"max_tokens": 30, "temperature": 0.0, "stop": [stop]}
    options["include_stop_str_in_output"] = keep
    whole = engine.generate("The first ten numbers are", **options)
    chunks = list(engine.stream("The first ten numbers are", **options))
    expected = full[: full.index(stop)] + (stop if keep else "")
    assert whole.text == joined(chunks)[0] == expected
    assert (whole.finish_reason, whole.completions[0].stop_reason) == ("stop", stop)
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", stop)


def test_stop_tokens_and_lengths(engine: Engine) -> None:
    whole = engine.generate(ask(), ignore_eos=True, **GREEDY)
    assert whole.finish_reason == "length"
    stopped = engine.generate(ask(), stop_token_ids=[whole.token_ids[3]], **GREEDY)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[3]) + 1]


def test_several_completions(engine: Engine) -> None:
    options = {"n": 3, "temperature": 1.0, "max_tokens": 8, "seed": 7, "ignore_eos": True}
    whole = engine.generate(ask(), **options)
    assert [completion.index for completion in whole.completions] == [0, 1, 2]
    assert len({completion.token_ids for completion in whole.completions}) > 1
    assert whole.usage.completion_tokens == 24
    chunks = list(engine.stream(ask(), **options))
    for completion in whole.completions:
        assert joined(chunks, completion.index) == (completion.text, completion.token_ids)
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert {c.index for c in chunks if c.finish_reason} == {0, 1, 2}


def test_seeds(engine: Engine) -> None:
    options = {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True}
    one, same, other = (
        engine.generate(ask(), seed=seed, **options).token_ids for seed in (1, 1, 2)
    )
    assert one == same != other
    # Beside other requests, and with the documents cold again.
    engine.reset_cache()
    beside = engine.generate([ask("Why?"), ask(), ask("Where?")], seed=1, **options)
    assert beside[1].token_ids == one


@pytest.mark.parametrize("n", [1, 2])
def test_a_seed_means_the_same_in_chunks(engine: Engine, exact_rig: Any, n: int) -> None:
    """However many steps a prompt takes, in a batch with others that are at their answers."""
    options = {"temperature": 1.5, "max_tokens": 8, "ignore_eos": True, "seed": 3, "n": n}

    def answers(result: Any) -> list[tuple[int, ...]]:
        return [one.token_ids for one in result.completions]

    exact_rig.reset()
    whole = answers(engine.generate(ask(), **options))
    assert len(set(whole)) == n
    exact_rig.reset()
    chunk = len(engine.explain(ask()).token_ids) // 5
    with exact_rig.chunked(chunk):
        first, *others = engine.generate([ask(), ask("Why?"), ask("Where?")], **options)
    assert answers(first) == whole
    exact_rig.reset()
    for question, other in zip(("Why?", "Where?"), others, strict=True):
        assert answers(other) == answers(engine.generate(ask(question), **options))


def test_usage_counts_tokens(engine: Engine) -> None:
    engine.reset_cache()
    shown = engine.explain(ask())
    cold = engine.generate(ask(), max_tokens=3, temperature=0.0, ignore_eos=True).usage
    warm = engine.generate(ask(), max_tokens=3, temperature=0.0, ignore_eos=True).usage
    assert cold.prompt_tokens == warm.prompt_tokens == len(shown.token_ids)
    assert cold.pad_tokens == sum(row.num_pads for row in shown.rows)
    assert cold.completion_tokens == 3
    assert cold.cached_tokens == 0
    whole_blocks = len(shown.token_ids) // engine.block_size * engine.block_size
    assert warm.cached_tokens == whole_blocks
    assert cold.cache_creation_tokens in (None, whole_blocks)


def test_explain_says_what_is_cached(engine: Engine) -> None:
    engine.reset_cache()
    assert {row.state for row in engine.explain(ask(), late=0).rows} == {"cold"}
    engine.generate(ask(), late=0, max_tokens=1)
    rows = engine.explain(ask(), late=0).rows
    assert [row.state for row in rows[:-1]] == ["warm"] * 4
    assert rows[-1].kind == "dependent"
    other = engine.explain(ask(), late=0, cache_salt="other")
    assert {row.state for row in other.rows} == {"cold"}


def test_timing(engine: Engine) -> None:
    timing = engine.generate(ask(), max_tokens=10, temperature=0.0, ignore_eos=True).timing
    assert 0 < timing.ttft_s < timing.total_s < 60


def test_warm_computes_once(engine: Engine) -> None:
    engine.reset_cache()
    texts = list(passages()[30:36])
    first = engine.warm([*texts, texts[0]], technique="block_attention")
    again = engine.warm(texts, technique="block_attention")
    assert (first.num_spans, again.num_spans) == (6, 6)
    assert first.num_cached_tokens == 0
    assert again.num_computed_tokens < first.num_computed_tokens / 5
    prompt = Prompt([*map(Span, reversed(texts)), Text("Why?")])
    usage = engine.generate(prompt, technique="block_attention", max_tokens=1).usage
    rows = engine.explain(prompt, technique="block_attention").rows
    assert usage.cached_tokens == sum(row.num_tokens for row in rows if row.kind == "span")


def test_warm_behind_a_prefix(engine: Engine) -> None:
    engine.reset_cache()
    texts = list(passages()[40:43])
    spans = [Span(text) for text in texts]
    prompt = Prompt.chat([Message("system", "Be brief."), Message("user", [*spans, Text("Why?")])])
    engine.warm(texts, prompt=prompt)
    usage = engine.generate(prompt, max_tokens=1).usage
    question = engine.explain(prompt).rows[-1]
    assert usage.cached_tokens == usage.prompt_tokens - question.num_tokens


def test_structured_outputs(engine: Engine) -> None:
    answer = engine.generate(
        ask("Is it about Python?"),
        structured_outputs={"choice": ["yes", "no"]},
        max_tokens=5,
        temperature=0.0,
    )
    assert answer.text in ("yes", "no")
