"""What users of other vLLM classes for LangChain ran into, where only a real engine can show it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_minipic import ChatMiniPIC, MiniPIC, span_block
from langchain_model import model_params
from side_by_side import script

from minipic_backend import EngineClosedError


@pytest.fixture(scope="module")
def llm() -> ChatMiniPIC:
    return ChatMiniPIC(**model_params(max_tokens=8))


def test_instruct_model_that_never_stops(llm: ChatMiniPIC) -> None:
    answer = llm.invoke("Say only the word yes.", max_tokens=200)
    assert answer.response_metadata["finish_reason"] == "stop"
    assert "<|im_end|>" not in answer.content


def test_doubled_bos(llm: ChatMiniPIC) -> None:
    ids = llm.explain([SystemMessage("Be brief."), HumanMessage("Hello")]).token_ids
    bos = llm._get_engine().tokenizer.bos_token_id  # type: ignore[attr-defined]
    assert ids[0] == bos
    assert ids[1] != bos


def test_cached_tokens_null_despite_the_flag(llm: ChatMiniPIC) -> None:
    messages = [HumanMessage([span_block("The red box holds coins. " * 20), "What is in it?"])]
    llm.invoke(messages)
    whole = llm.invoke(messages).usage_metadata["input_token_details"]["cache_read"]
    chunks = list(llm.stream(messages))
    assert whole == chunks[-1].usage_metadata["input_token_details"]["cache_read"] > 0


def test_n_3_returning_one(llm: ChatMiniPIC) -> None:
    result = llm.generate([[HumanMessage("Name a colour.")]], n=3, temperature=1, seed=1)
    assert len(result.generations[0]) == 3


def test_seed_and_logprobs(llm: ChatMiniPIC) -> None:
    options: dict[str, Any] = {"temperature": 1, "seed": 7, "logprobs": 2}
    first, second = (llm.invoke("Name a colour.", **options) for _ in range(2))
    assert first.content == second.content
    rows = first.response_metadata["logprobs"]
    assert len(rows) == first.usage_metadata["output_tokens"]
    assert all(len(row["top"]) >= 2 and row["logprob"] <= 0 for row in rows)


def test_default_of_16_new_tokens_on_completions() -> None:
    text = MiniPIC(**model_params())
    pieces = 0
    stream = text.stream("Once upon a time", ignore_eos=True)
    for _ in stream:
        pieces += 1
        if pieces > 20:
            break
    stream.close()  # type: ignore[attr-defined]
    assert pieces > 20


def test_negative_room_as_a_chat_grows(llm: ChatMiniPIC) -> None:
    """The answer ends where the context does, also where `max_tokens` asks for more."""
    words = "word " * 1980
    answer = llm.invoke(words, max_tokens=500, ignore_eos=True)
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata["total_tokens"] <= 2048


def test_cancel_not_aborting_the_request_within_a_second(llm: ChatMiniPIC) -> None:
    driver = llm._get_engine()._driver  # type: ignore[attr-defined]

    async def main() -> float:
        slow = asyncio.ensure_future(llm.ainvoke("Story?", max_tokens=1900, ignore_eos=True))
        while not driver._handles:
            await asyncio.sleep(0.01)
        slow.cancel()
        started = time.perf_counter()
        with pytest.raises(asyncio.CancelledError):
            await slow
        while driver._handles:
            await asyncio.sleep(0.005)
        return time.perf_counter() - started

    assert asyncio.run(main()) < 1


def test_a_stream_that_is_left_ends_its_request(llm: ChatMiniPIC) -> None:
    driver = llm._get_engine()._driver  # type: ignore[attr-defined]
    stream = llm.stream("Tell a story.", max_tokens=1900, ignore_eos=True)
    next(stream)
    stream.close()
    deadline = time.perf_counter() + 5
    while driver._handles and time.perf_counter() < deadline:
        time.sleep(0.005)
    assert not driver._handles


_LIFE = """
import gc, os
from langchain_minipic import ChatMiniPIC
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
llm = ChatMiniPIC(model={model}, max_tokens=4, temperature=0,
                  engine_options={{"max_model_len": 1024, "kv_cache_gib": 1.0}})
llm.invoke("word " * 800)
before = resident()
llm.close(); llm.close(); gc.collect()
print("freed", int(before - resident()))
"""


@pytest.mark.process(run=script(_LIFE))
def test_engine_memory_not_released_close_not_idempotent_noise_at_exit(done: Any) -> None:
    """A plain script: no `if __name__`, nothing on its way out but what it prints."""
    assert done.returncode == 0, done.stderr[-2000:]
    label, freed = done.stdout.splitlines()[-1].split()  # the last thing it says
    assert label == "freed"
    assert int(freed) > 200  # MiB: the weights alone are 256
    assert "Traceback" not in done.stderr


def test_closed_is_closed() -> None:
    text = MiniPIC(**model_params(max_tokens=4))
    text.invoke("x")
    text.close()
    with pytest.raises(EngineClosedError):
        text.invoke("x")
