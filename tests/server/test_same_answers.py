"""A server answers as the embedded engine does: same tokens, same text, same usage."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from documents import chat, fresh, passages

from minipic_backend import Engine, Prompt, RemoteEngine, Span, Text

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
PROMPTS = {
    "spans": chat(list(passages()[:4])),
    "no spans": chat([]),
    "raw": Prompt([Text("Facts:\n"), Span(passages()[5]), Text("In short:")]),
    "text": "The capital of France is",
}
LAYOUTS = {
    "default": {},
    "isolated": {"technique": "block_attention"},
    "padded": {"offsets": "padded", "late": 0},
    "unseen markers": {"see_markers": False, "late": 0},
    "full": {"technique": "full"},
}


def ids_of(pieces: list[Any]) -> tuple[int, ...]:
    return tuple(token for piece in pieces for token in piece.token_ids)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_same_tokens_and_text(
    remote: RemoteEngine, embedded: Engine, prompt: Any, sampling: dict[str, Any]
) -> None:
    want = embedded.generate(prompt, max_tokens=24, **sampling)
    for _ in range(2):  # cold, warm
        got = remote.generate(prompt, max_tokens=24, **sampling)
        assert got.token_ids == want.token_ids
        assert got.text == want.text
        assert got.finish_reason == want.finish_reason


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_same_layout_and_usage(
    remote: RemoteEngine, embedded: Engine, layout: dict[str, Any]
) -> None:
    prompt = chat(fresh(3))
    assert (
        remote.explain(prompt, **layout).token_ids == embedded.explain(prompt, **layout).token_ids
    )
    for run in ("cold", "warm"):
        want = embedded.generate(prompt, max_tokens=6, **GREEDY, **layout)
        got = remote.generate(prompt, max_tokens=6, **GREEDY, **layout)
        assert got.token_ids == want.token_ids, run
        # The prefix, which prompts share, may be there already or not.
        total = lambda usage: usage.cached_tokens + usage.cache_creation_tokens  # noqa: E731
        assert total(got.usage) == total(want.usage), run
        assert got.usage.prompt_tokens == want.usage.prompt_tokens
        assert got.usage.pad_tokens == want.usage.pad_tokens
    assert got.usage.cached_tokens == want.usage.cached_tokens


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
def test_streaming_equals_non_streaming(
    server: Any, remote: RemoteEngine, sampling: dict[str, Any]
) -> None:
    prompt = PROMPTS["spans"]
    options = {"max_tokens": 24, **sampling}
    layout: dict[str, Any] = {"see_primer": True}  # so that the frame is all that it chooses
    remote.generate(prompt, **{**options, "max_tokens": 1}, **layout)  # usage tells what was cached
    whole = remote.generate(prompt, **options, **layout)
    pieces = list(remote.stream(prompt, **options, **layout))
    assert len(pieces) > 1  # a slow machine sends several tokens at once
    assert "".join(piece.text for piece in pieces) == whole.text
    assert ids_of(pieces) == whole.token_ids
    assert pieces[-1].finish_reason == whole.finish_reason
    assert pieces[-1].usage == whole.usage

    async def streamed() -> list[Any]:
        return [piece async for piece in remote.astream(prompt, **options, **layout)]

    for _ in range(2):  # each on an event loop of its own
        assert ids_of(asyncio.run(streamed())) == whole.token_ids
    # And as the server does it where nobody asks for a stream, which we never do.
    body = {
        "model": remote.model,
        "prompt": list(remote.explain(prompt).token_ids),
        "return_token_ids": True,
        "vllm_xargs": {"minipic": '{"frame": "prefix"}'},
        **options,
    }
    answer = server.request("POST", "/completions", json=body).json()
    assert tuple(answer["choices"][0]["token_ids"]) == whole.token_ids
    assert answer["choices"][0]["text"] == whole.text


def test_stop_strings_and_ids(remote: RemoteEngine, embedded: Engine) -> None:
    prompt = "1, 2, 3, 4, 5, 6,"
    free = embedded.generate(prompt, max_tokens=12, **GREEDY)
    token = free.token_ids[5]
    for options in ({"stop": [" 9", "9"]}, {"stop_token_ids": [token]}, {"stop": "zebra"}):
        want = embedded.generate(prompt, max_tokens=12, **GREEDY, **options)
        got = remote.generate(prompt, max_tokens=12, **GREEDY, **options)
        assert (got.text, got.token_ids) == (want.text, want.token_ids)
        assert got.completions[0].stop_reason == want.completions[0].stop_reason
        streamed = list(remote.stream(prompt, max_tokens=12, **GREEDY, **options))
        assert "".join(piece.text for piece in streamed) == want.text


def test_logprobs(remote: RemoteEngine, embedded: Engine) -> None:
    """Tolerance 1e-3: float32, and sums in another order in another process."""
    options = {"max_tokens": 5, "logprobs": 3, **GREEDY}
    want = embedded.generate(PROMPTS["spans"], **options).completions[0].logprobs
    got = remote.generate(PROMPTS["spans"], **options).completions[0].logprobs
    assert want is not None
    assert got is not None
    assert len(got) == len(want) == 5
    for ours, theirs in zip(got, want, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_several_completions(remote: RemoteEngine, embedded: Engine) -> None:
    options = {"n": 3, "max_tokens": 6, **SAMPLED}
    want = embedded.generate(PROMPTS["spans"], **options)
    got = remote.generate(PROMPTS["spans"], **options)
    assert [one.token_ids for one in got.completions] == [one.token_ids for one in want.completions]
    assert len({one.text for one in got.completions}) > 1


def test_structured_output(remote: RemoteEngine) -> None:
    options = {"structured_outputs": {"choice": ["heron", "otter"]}, **GREEDY}
    assert remote.generate(PROMPTS["spans"], **options).text in ("heron", "otter")


def test_a_list_of_prompts(remote: RemoteEngine, embedded: Engine) -> None:
    prompts = [chat(list(passages()[i : i + 2])) for i in range(8)]
    want = embedded.generate(prompts, max_tokens=6, **GREEDY)
    got = remote.generate(prompts, max_tokens=6, **GREEDY)
    assert [one.token_ids for one in got] == [one.token_ids for one in want]
    assert all(one.usage.cached_tokens is not None for one in got)


def test_no_limit_means_the_rest_of_the_context(remote: RemoteEngine) -> None:
    """Not the 16 tokens of OpenAI's route."""
    words = "word" + " word" * (remote.max_model_len - 21)
    assert remote.count_tokens(words) == remote.max_model_len - 20
    result = remote.generate(words, temperature=0.0, ignore_eos=True)
    assert result.usage.completion_tokens == 20
    assert result.finish_reason == "length"


def test_warming(remote: RemoteEngine) -> None:
    documents = fresh(3)
    prompt = chat(documents)
    report = remote.warm(documents, prompt=prompt)
    assert report.num_spans == 3
    assert report.num_computed_tokens > 0
    assert remote.warm(documents, prompt=prompt).num_cached_tokens > report.num_cached_tokens
    usage = remote.generate(prompt, late=0, max_tokens=1).usage
    rows = remote.explain(prompt, late=0).rows
    question = rows[-1].num_tokens
    assert usage.cached_tokens == usage.prompt_tokens - question
