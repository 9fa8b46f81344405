"""Ordinary prompts: the same tokens and block hashes with the plugin enabled, disabled and absent.

Two further processes, with a fixed PYTHONHASHSEED (which vLLM's first parent hash comes from):
one that never sees MiniPIC, and one in which it is registered, with an engine that does not ask
for it and one that does.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prompts import PromptMaker, join
from side_by_side import python

from minipic_backend.config import SpanOptions
from minipic_backend.errors import MalformedSpansError

SCRIPT = Path(__file__).with_name("ordinary_engine.py")


@pytest.fixture(scope="module")
def found(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By mode: tokens, log-probabilities and block hashes of a few ordinary prompts."""
    folder = tmp_path_factory.mktemp("ordinary")

    def observe(*modes: str) -> dict[str, Any]:
        out = folder / f"{modes[0]}.json"
        env = {"PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        if modes == ("absent",):
            # The path goes too: an entry point found there would be MiniPIC's.
            env |= {"VLLM_PLUGINS": "", "PYTHONPATH": ""}
        done = python(SCRIPT, model, out, *modes, **env)(folder, model)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(out.read_text())  # type: ignore[no-any-return]

    with ThreadPoolExecutor() as pool:
        absent = pool.submit(observe, "absent")
        return observe("disabled", "enabled") | absent.result()


def test_the_absent_plugin_was_absent(found: dict[str, Any]) -> None:
    assert not found["absent"]["imported"]
    assert not found["absent"]["patched"]
    assert found["disabled"]["imported"]
    assert found["enabled"]["imported"]


def test_off_means_off(found: dict[str, Any]) -> None:
    """Registered but not enabled, every part of the engine is vLLM's own."""
    assert found["disabled"]["parts"] == found["absent"]["parts"]
    assert set(found["enabled"]["parts"]) & set(found["absent"]["parts"]) == set()


@pytest.mark.parametrize("mode", ["disabled", "enabled"])
@pytest.mark.parametrize("what", ["tokens", "logprobs", "hashes", "cached_tokens"])
def test_equal_to_the_last_bit(found: dict[str, Any], mode: str, what: str) -> None:
    assert any(found["absent"][what])
    assert found[mode][what] == found["absent"][what]


def test_hashes_are_those_of_vllms_own_hasher(rig: Any, make: PromptMaker) -> None:
    text = make.encode("Generators are functions that yield values one at a time. " * 20)
    for salt in (None, "tenant"):
        for length in (1, 31, 32, 33, 200):
            ours = rig.block_hashes(text[:length], SpanOptions(), salt)
            assert ours == rig.stock_hashes(text[:length], salt)
            assert len(ours) == length // rig.config.block_size


def test_generated_tokens_are_hashed_as_vllm_does(rig: Any, make: PromptMaker) -> None:
    """Markers and pads among them mean nothing."""
    prompt = make.encode("Generators yield values.")
    generated = [rig.config.ssep, rig.config.pdep, rig.config.pad] * 30
    stock = rig.request(prompt, hasher=rig.stock_hasher)
    ours = rig.request(prompt)
    for token in generated:
        stock.append_output_token_ids(token)
        ours.append_output_token_ids(token)
    assert ours.block_hashes == stock.block_hashes
    assert len(ours.block_hashes) == (len(prompt) + len(generated)) // rig.config.block_size


def test_a_marker_counts_at_the_start_of_a_block_alone(rig: Any, make: PromptMaker) -> None:
    """The engine core does not look elsewhere: vLLM's front end has (`test_bad_input.py`)."""
    text = make.encode("Generators are functions that yield values one at a time. " * 20)
    size = rig.config.block_size
    for marker in (rig.config.ssep, rig.config.pdep):
        for inside in (1, size - 1, size + 1, 3 * size - 1):
            forged = [*text[:inside], marker, *text[inside + 1 :]]
            assert rig.block_hashes(forged) == rig.stock_hashes(forged)
        for start in (size, 3 * size):
            marked = [*text[:start], rig.config.ssep, *text[start + 1 :], marker]
            marked += [0] * (-len(text) % size)
            with pytest.raises(MalformedSpansError):
                rig.block_hashes(marked)


def test_ordinary_batches_never_gather_under_span_local(
    exact_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minipic_backend.plugin import cpu_attention

    rig = exact_rig
    make = PromptMaker(rig.engine.tokenizer, rig.config)
    gathered: list[tuple[int, int]] = []
    real = cpu_attention.gathered_attention

    def counting(query: Any, key_cache: Any, value_cache: Any, run: Any, *rest: Any) -> Any:
        gathered.append((run.query, run.num_queries))
        return real(query, key_cache, value_cache, run, *rest)

    monkeypatch.setattr(cpu_attention, "gathered_attention", counting)
    ordinary = [make.encode(f"Question {i}: what is a generator? " * 6) for i in range(3)]
    rig.reset()
    with rig.paused():
        handles = [rig.submit(prompt, num_tokens=3) for prompt in ordinary]
    for handle in handles:
        rig.read(handle)
    assert not gathered

    # Beside a span prompt, which stands last in the batch, ordinary rows are not gathered either.
    question = make.question()
    span_prompt = join(make.prefix(), *make.spans(1), question)
    rig.reset()
    with rig.paused():
        handles = [rig.submit(prompt) for prompt in (*ordinary, span_prompt)]
    for handle in handles:
        rig.read(handle)
    at = sum(map(len, ordinary)) + len(span_prompt) - len(question)
    assert set(gathered) == {(at, len(question))}


def test_an_ordinary_prompt_beside_spans_is_not_changed_by_them(
    rig: Any, make: PromptMaker
) -> None:
    from check import assert_same

    ordinary = make.encode("Tell me about Python generators and their use in loops. " * 5)
    rig.reset()
    alone = rig.run(ordinary, num_tokens=4)
    rig.reset()
    with rig.paused():
        first = rig.submit(make.usual(2), num_tokens=4)
        middle = rig.submit(ordinary, num_tokens=4)
        last = rig.submit(make.usual(3, first=5), SpanOptions("none"), num_tokens=4)
    beside = rig.read(middle)
    rig.read(first)
    rig.read(last)
    assert_same(rig, beside, alone)
