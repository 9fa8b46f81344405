"""What users of other vLLM classes for LangChain ran into: a test for each.

Those that only a real engine can show are in `tests/engine/test_langchain_engine_reported.py`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import MessagesPlaceholder
from langchain_minipic import ChatMiniPIC, MiniPIC, SpanPromptTemplate, span_block
from langchain_support import ANSWER, DOCUMENTS, collect, last_of
from pydantic import BaseModel

from minipic_backend import ContextWindowError, Prompt
from minipic_backend.testing import FakeEngine


def chat(engine: FakeEngine | None = None, **options: Any) -> ChatMiniPIC:
    return ChatMiniPIC(model="m", engine=engine or FakeEngine(ANSWER), **options)


@pytest.fixture
def cache() -> Iterator[InMemoryCache]:
    cache = InMemoryCache()
    set_llm_cache(cache)
    yield cache
    set_llm_cache(None)


def test_one_piece_streaming() -> None:
    assert len(list(chat().stream("x"))) > 2
    assert len(collect(chat().astream("x"))) > 2
    assert len(list(MiniPIC(model="m", engine=FakeEngine(ANSWER)).stream("x"))) > 2


def test_constructor_stop_ignored() -> None:
    llm = chat(stop=["Teut"])
    texts = [llm.invoke("x").content, last_of(list(llm.stream("x"))).content]
    texts += [asyncio.run(llm.ainvoke("x")).content, llm.batch(["x"])[0].content]
    assert set(texts) == {"Her name was "}


def test_multi_token_stop_differs_between_stream_and_invoke() -> None:
    llm = chat()
    for stop in ("name was Teut", "r n", "was Teutberga."):
        whole = llm.invoke("x", stop=[stop]).content
        assert last_of(list(llm.stream("x", stop=[stop]))).content == whole
        assert last_of(collect(llm.astream("x", stop=[stop]))).content == whole


def test_best_of_removed_and_complete_raising() -> None:
    with pytest.raises(ValueError, match=r"best_of.*did you mean 'n'"):
        MiniPIC(model="m", best_of=2)
    assert MiniPIC(model="m", engine=FakeEngine(ANSWER)).invoke("x") == ANSWER


def test_async_that_blocks_the_event_loop() -> None:
    llm = chat(FakeEngine(ANSWER, ttft_s=0.3))

    async def main() -> int:
        ticks, call = 0, asyncio.ensure_future(llm.ainvoke("x"))
        while not call.done():
            ticks += 1
            await asyncio.sleep(0.01)
        return ticks

    assert asyncio.run(main()) > 5


def test_abatch_serial() -> None:
    engine = FakeEngine(ANSWER, gather=16)  # answers nobody before all 16 are there
    assert len(asyncio.run(chat(engine).abatch(["x"] * 16))) == 16
    engine = FakeEngine(ANSWER, gather=16)
    text = MiniPIC(model="m", engine=engine)
    assert asyncio.run(text.abatch(["x"] * 16)) == [ANSWER] * 16


def test_threads_32_at_once_failing() -> None:
    engine = FakeEngine(lambda p: p.messages[-1].parts[0].text.upper(), gather=32)
    llm = chat(engine)
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda i: llm.invoke(f"q{i}").content, range(32)))
    assert answers == [f"Q{i}" for i in range(32)]


def test_close_not_idempotent() -> None:
    llm = chat()
    llm.close()
    llm.close()
    MiniPIC(model="never started").close()


def test_system_human_human_on_a_template_whose_roles_must_alternate() -> None:
    engine = FakeEngine(ANSWER)
    messages = [SystemMessage("s"), SystemMessage("t"), HumanMessage("a"), HumanMessage("b")]
    chat(engine).invoke([*messages, AIMessage("c"), HumanMessage("d")])
    roles = [message.role for message in engine.prompts[-1].messages]
    assert roles == ["system", "user", "assistant", "user"]
    merged = "".join(part.text for part in engine.prompts[-1].messages[1].parts)
    assert merged == "a\n\nb"


def test_usage_missing_in_streams() -> None:
    for chunks in (list(chat().stream("x")), collect(chat().astream("x"))):
        with_usage = [chunk for chunk in chunks if chunk.usage_metadata]
        assert with_usage == chunks[-1:]
        assert with_usage[0].usage_metadata["output_tokens"] == 4


def test_cached_tokens_null_despite_the_flag() -> None:
    llm = chat()
    messages = [HumanMessage([span_block("A document."), "And?"])]
    llm.invoke(messages)
    for answer in (llm.invoke(messages), last_of(list(llm.stream(messages)))):
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 0


def test_reasoning_text_dropped() -> None:
    llm = chat(FakeEngine("<think>Easy.</think>Yes."), reasoning_parser="think")
    for answer in (llm.invoke("x"), last_of(list(llm.stream("x")))):
        assert answer.content == "Yes."
        assert answer.additional_kwargs["reasoning_content"] == "Easy."


def test_forced_tool_calls_left_as_text() -> None:
    class Queen(BaseModel):
        """A queen."""

        name: str

    llm = chat(FakeEngine('{"name": "Teutberga"}')).bind_tools([Queen], tool_choice="any")
    for answer in (llm.invoke("x"), last_of(list(llm.stream("x")))):
        assert answer.content == ""
        assert answer.tool_calls[0]["args"] == {"name": "Teutberga"}


def test_n_3_returning_one() -> None:
    for llm in (chat(n=3), MiniPIC(model="m", engine=FakeEngine(ANSWER), n=3)):
        prompts: Any = [[HumanMessage("x")]] if isinstance(llm, ChatMiniPIC) else ["x"]
        assert len(llm.generate(prompts).generations[0]) == 3


@pytest.mark.parametrize(
    "changed",
    [{"temperature": 0.5}, {"technique": "full"}, {"max_tokens": 3}, {"model": "other"}],
)
@pytest.mark.parametrize("kind", [ChatMiniPIC, MiniPIC])
def test_cache_keyed_without_model_or_parameters(
    cache: InMemoryCache, kind: Any, changed: dict[str, Any]
) -> None:
    engine = FakeEngine(ANSWER)
    options = {"model": "m", "engine": engine, "temperature": 0}
    kind(**options).invoke("x")
    kind(**options).invoke("x")
    assert len(engine.calls) == 1
    kind(**{**options, **changed}).invoke("x")
    assert len(engine.calls) == 2


def test_marks_lost_in_templates() -> None:
    prompt = SpanPromptTemplate.from_messages(
        [("system", "s"), MessagesPlaceholder("history"), ("human", "{context}\n\n{question}")]
    )
    values = {"history": [HumanMessage([span_block("Old.")]), AIMessage("ok")]}
    values |= {"context": DOCUMENTS, "question": "?"}
    engine = FakeEngine(ANSWER)
    for variant in (prompt, prompt + HumanMessage("!"), prompt[:], prompt.partial(question="?")):
        (variant | chat(engine)).invoke(values)
        assert len(engine.prompts[-1].spans) == 4


def test_cancel_not_aborting_the_request_within_a_second() -> None:
    engine = FakeEngine(ANSWER, ttft_s=30)

    async def main() -> None:
        call = asyncio.ensure_future(chat(engine).ainvoke("x"))
        while not engine.calls:
            await asyncio.sleep(0.005)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    started = time.perf_counter()
    asyncio.run(main())
    assert len(engine.aborted) == 1
    assert time.perf_counter() - started < 10  # of 30


def test_event_loop_is_closed_on_a_second_asyncio_run() -> None:
    llm = chat()
    for _ in range(3):
        assert asyncio.run(llm.ainvoke("x")).content == ANSWER
        assert last_of(collect(llm.astream("x"))).content == ANSWER


def test_a_lists_repr_in_the_prompt() -> None:
    prompt = SpanPromptTemplate.from_messages([("human", "{context}\n\n{question}")])
    engine = FakeEngine(ANSWER)
    for documents in (DOCUMENTS, [(document, 0.5) for document in DOCUMENTS]):
        (prompt | chat(engine)).invoke({"context": documents, "question": "?"})
        text = "".join(part.text for part in engine.prompts[-1].messages[0].parts)
        assert "Document(" not in text
        assert text == "\n\n".join([*(d.page_content for d in DOCUMENTS), "?"])


def test_default_of_16_new_tokens_on_completions() -> None:
    text = MiniPIC(model="m", engine=FakeEngine("word " * 200))
    assert text.invoke("x") == "word " * 200


def test_context_window_of_3900_instead_of_the_models() -> None:
    assert chat(FakeEngine(max_model_len=8192)).profile["max_input_tokens"] == 8192
    given = ChatMiniPIC(model="m", engine_options={"max_model_len": 2048})
    assert given.profile["max_input_tokens"] == 2048


def test_negative_room_as_a_chat_grows() -> None:
    llm = chat(FakeEngine(lambda p: "word " * 500, max_model_len=40))
    history: list[Any] = [HumanMessage("x")]
    answer = llm.invoke(history)
    assert answer.response_metadata["finish_reason"] == "length"
    with pytest.raises(ContextWindowError, match="40"):
        llm.invoke([*history, answer, HumanMessage("y")])


def test_import_noise_at_exit_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['vllm'] = None\n"
        "from langchain_minipic import ChatMiniPIC\n"
        "from minipic_backend.testing import FakeEngine\n"
        "print(ChatMiniPIC(model='m', engine=FakeEngine('yes')).invoke('x').content)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert (done.stdout, done.stderr) == ("yes\n", "")


def test_a_prompt_that_fails_takes_its_batch_with_it() -> None:
    def answer(prompt: Prompt) -> str:
        if "bad" in prompt.parts[0].text:
            raise ValueError("bad one")
        return "ok"

    llm = MiniPIC(model="m", engine=FakeEngine(answer))
    batches = [
        llm.batch(["a", "bad", "b"], return_exceptions=True),
        asyncio.run(llm.abatch(["a", "bad", "b"], return_exceptions=True)),
    ]
    for first, second, third in batches:
        assert (first, third) == ("ok", "ok")
        assert isinstance(second, ValueError)
    with pytest.raises(ValueError, match="bad one"):
        llm.batch(["a", "bad"])


def test_documents_of_other_kinds_are_named() -> None:
    prompt = SpanPromptTemplate.from_messages([("human", "{context}")])
    with pytest.raises(ValueError, match="Element 1"):
        prompt.invoke({"context": [Document("a"), {"page_content": "b"}]})
    with pytest.raises(ValueError, match="whitespace"):
        SpanPromptTemplate.from_messages([("human", "{context}")], document_separator="---")
