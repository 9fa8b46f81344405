"""The model: options, streams, usage, cancelling, the engine behind it."""

from __future__ import annotations

import asyncio
import copy
import gc
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core import PromptTemplate, Settings
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.callbacks.schema import CBEventType
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.llms.minipic import CallEvent, CallRecord, MiniPIC, install
from llama_index_instrumentation import get_dispatcher

from minipic_backend import (
    ConfigurationError,
    EngineClosedError,
    Prompt,
    PromptError,
)
from minipic_backend.engines import shared as shared_engines
from minipic_backend.engines.shared import EngineSpec
from minipic_backend.testing import FakeEngine

MESSAGES = [ChatMessage(content="Count to four.")]
ANSWER = "one two three four"


def model(engine: FakeEngine | None = None, **options: Any) -> tuple[MiniPIC, FakeEngine]:
    engine = engine or FakeEngine(ANSWER)
    return MiniPIC(engine=engine, **options), engine


async def astream(llm: MiniPIC, **kwargs: Any) -> list[Any]:
    return [response async for response in await llm.astream_chat(MESSAGES, **kwargs)]


# ---- options --------------------------------------------------------------------------------


def test_options_of_the_model_and_of_a_call() -> None:
    llm, engine = model(temperature=0.5, max_tokens=9, min_p=0.1, technique="full")
    llm.chat(MESSAGES, temperature=0.0, top_k=3)
    assert dict(engine.calls[0].options) == {
        "technique": "full",
        "temperature": 0.0,
        "max_tokens": 9,
        "min_p": 0.1,
        "top_k": 3,
    }


@pytest.mark.parametrize("name", ["temprature", "best_of", "max_new_tokens"])
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        model(**{name: 1})
    llm, engine = model()
    with pytest.raises(ConfigurationError, match=name):
        llm.complete("x", **{name: 1})
    assert not engine.calls


@pytest.mark.parametrize("where", ["constructor", "call"])
def test_stop_cuts_streams_and_answers_alike(where: str) -> None:
    stop = "three four"  # several tokens
    llm, _ = model(**({"stop": [stop]} if where == "constructor" else {}))
    kwargs = {} if where == "constructor" else {"stop": stop}
    texts = [
        llm.chat(MESSAGES, **kwargs).message.content,
        llm.complete("Count.", **kwargs).text,
        list(llm.stream_chat(MESSAGES, **kwargs))[-1].message.content,
        list(llm.stream_complete("Count.", **kwargs))[-1].text,
        asyncio.run(astream(llm, **kwargs))[-1].message.content,
    ]
    assert texts == ["one two "] * 5


def test_no_limit_of_sixteen_tokens() -> None:
    llm, engine = model(FakeEngine("word " * 100))
    assert len(llm.complete("x").text.split()) == 100
    assert "max_tokens" not in engine.calls[0].options


def test_several_answers() -> None:
    llm, _ = model(FakeEngine(["one", "two", "three"]))
    raw = llm.chat(MESSAGES, n=3).raw
    assert [choice["text"] for choice in raw["choices"]] == ["one", "two", "three"]
    with pytest.raises(ConfigurationError, match="n=3"):
        llm.stream_chat(MESSAGES, n=3)


def test_logprobs_are_in_raw() -> None:
    llm, _ = model()
    for raw in (
        llm.chat(MESSAGES, logprobs=1).raw,
        list(llm.stream_chat(MESSAGES, logprobs=1))[-1].raw,
    ):
        assert len(raw["choices"][0]["logprobs"]) == 4
        assert raw["choices"][0]["logprobs"][0]["logprob"] == 0.0


def test_completions_are_chats_or_plain() -> None:
    llm, engine = model()
    llm.complete("Hello.")
    llm.complete("Hello.", formatted=True)
    MiniPIC(engine=engine, is_chat_model=False).complete("Hello.")
    assert [prompt.is_chat for prompt in engine.prompts] == [True, False, False]
    assert engine.prompts[1] == Prompt("Hello.")


def test_system_prompt_and_template_variables() -> None:
    llm, engine = model(system_prompt="Be brief.", chat_template_kwargs={"enable_thinking": False})
    llm.predict(PromptTemplate("Say {x}."), x="hello")
    (prompt,) = engine.prompts
    assert [message.role for message in prompt.messages] == ["system", "user"]
    assert prompt.template_kwargs == {"enable_thinking": False}
    llm.chat(MESSAGES, chat_template_kwargs={"enable_thinking": True})
    assert engine.prompts[1].template_kwargs == {"enable_thinking": True}


# ---- metadata -------------------------------------------------------------------------------


def test_metadata_is_true() -> None:
    llm, _ = model(FakeEngine(max_model_len=777), max_tokens=99)
    metadata = llm.metadata
    assert (metadata.context_window, metadata.num_output) == (777, 99)
    assert metadata.is_chat_model
    assert metadata.is_function_calling_model
    assert MiniPIC(engine=llm.engine, context_window=500).metadata.context_window == 500
    text = MiniPIC(engine=llm.engine, is_chat_model=False).metadata
    assert (text.is_chat_model, text.is_function_calling_model) == (False, False)


def test_tokens_are_the_models_own() -> None:
    llm, engine = model()
    assert llm.token_ids("a b c") == engine.token_ids("a b c")
    assert llm.count_tokens("a b c") == 3


def test_payload_has_no_secret() -> None:
    options = {"hf_token": "a secret", "max_model_len": 64}
    llm, _ = model(
        api_key="sk-secret", headers={"x": "secret"}, engine_options=options, temperature=0.5
    )
    for text in (str(llm.to_payload()), str(llm.to_dict()), llm.to_json(), repr(llm)):
        assert "secret" not in text
    assert llm.to_dict()["engine_options"] == {"max_model_len": 64}
    assert llm.engine_options == options
    assert llm.to_payload()["temperature"] == 0.5


def test_traces_hold_neither_secrets_nor_the_engine() -> None:
    seen: list[str] = []

    class Tracer(BaseEventHandler):
        def handle(self, event: Any, **kwargs: Any) -> None:
            seen.append(f"{event!r} {event.model_dump()}")

    llm, _ = model(
        api_key="sk-secret",
        headers={"x": "a secret"},
        engine_options={"hf_token": "a secret"},
    )
    dispatcher = get_dispatcher()
    dispatcher.add_event_handler(tracer := Tracer())
    try:
        llm.chat(MESSAGES)
        list(llm.stream_complete("x"))
        asyncio.run(llm.achat(MESSAGES))
    finally:
        dispatcher.event_handlers.remove(tracer)
    assert len(seen) >= 6
    assert not any("secret" in text or "FakeEngine" in text for text in seen)


# ---- usage and events -----------------------------------------------------------------------


def test_usage_in_raw_streams_and_records() -> None:
    llm, _ = model()
    with llm.record() as calls:
        whole = llm.chat(MESSAGES)
        streamed = list(llm.stream_chat(MESSAGES))
        llm.complete("x", formatted=True)
    usage = whole.raw["usage"]
    assert usage["completion_tokens"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert streamed[-1].raw["usage"] == usage
    assert all("usage" not in response.raw for response in streamed[:-1])
    assert whole.additional_kwargs["total_tokens"] == usage["total_tokens"]
    assert [record.kind for record in calls] == ["chat", "chat", "complete"]
    assert all(record.usage.completion_tokens == 4 for record in calls)
    assert all(record.finish_reason == "stop" for record in calls)
    assert list(llm.calls) == calls
    llm.chat(MESSAGES)
    assert len(calls) == 3
    assert len(llm.calls) == 4


def test_callbacks_and_instrumentation() -> None:
    class Handler(BaseEventHandler):
        @classmethod
        def class_name(cls) -> str:
            return "Handler"

        def handle(self, event: Any, **kwargs: Any) -> None:
            names.append(event.class_name())
            if isinstance(event, CallEvent):
                records.append(event.record)

    names: list[str] = []
    records: list[CallRecord] = []
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm, _ = model(callback_manager=CallbackManager([debug]))
    handler = Handler()
    get_dispatcher().add_event_handler(handler)
    try:
        llm.chat(MESSAGES)
        list(llm.stream_complete("x"))
    finally:
        get_dispatcher().event_handlers.remove(handler)
    assert len(debug.get_event_pairs(CBEventType.LLM)) == 2
    assert {"LLMChatStartEvent", "LLMChatEndEvent", "LLMCompletionInProgressEvent"} <= set(names)
    assert [record.kind for record in records] == ["chat", "chat"]


# ---- cancelling -----------------------------------------------------------------------------


def wait_for(condition: Any, seconds: float = 1.0) -> bool:
    end = time.perf_counter() + seconds
    while not condition() and time.perf_counter() < end:
        time.sleep(0.01)
    return bool(condition())


def test_leaving_a_stream_aborts_the_request() -> None:
    llm, engine = model(FakeEngine("word " * 50, token_s=0.05))
    for response in llm.stream_chat(MESSAGES):
        assert response.delta
        break
    gc.collect()
    assert wait_for(lambda: engine.aborted)


def test_leaving_an_async_stream_aborts_the_request() -> None:
    llm, engine = model(FakeEngine("word " * 50, token_s=0.05))

    async def main() -> None:
        async for response in await llm.astream_chat(MESSAGES):
            assert response.delta
            break
        gc.collect()
        for _ in range(100):
            if engine.aborted:
                return
            await asyncio.sleep(0.01)

    asyncio.run(main())
    assert engine.aborted


def test_cancelling_aborts_the_request_within_a_second() -> None:
    llm, engine = model(FakeEngine("word", ttft_s=30))

    async def main() -> None:
        tasks = [asyncio.create_task(llm.achat(MESSAGES)), asyncio.create_task(astream(llm))]
        while len(engine.calls) < 2:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=1)
        assert all(task.cancelled() for task in tasks)

    asyncio.run(main())
    assert len(engine.aborted) == 2


def test_timeout() -> None:
    llm, engine = model(FakeEngine("word", ttft_s=30), timeout=0.1)
    with pytest.raises(TimeoutError, match=r"0\.1"):
        llm.chat(MESSAGES)
    with pytest.raises(TimeoutError):
        list(llm.stream_chat(MESSAGES))
    with pytest.raises(TimeoutError):
        asyncio.run(llm.achat(MESSAGES))
    assert len(engine.aborted) == 3


def test_requests_run_together() -> None:
    llm, engine = model(FakeEngine("yes", gather=12))

    async def main() -> list[Any]:
        return await asyncio.gather(*(llm.achat(MESSAGES) for _ in range(12)))

    assert len(asyncio.run(main())) == 12
    assert engine.max_concurrency == 12


def test_threads_that_ask_first_at_once_hold_one_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would keep the engine when the model is closed."""
    make = EngineSpec.of

    def slowly(options: Any) -> EngineSpec:
        time.sleep(0.02)
        return make(options)

    monkeypatch.setattr(EngineSpec, "of", slowly)
    llm = MiniPIC(model="m")
    with ThreadPoolExecutor(8) as pool:
        leases = list(pool.map(lambda _: llm._hold.lease(llm), range(8)))
    assert len({id(lease) for lease in leases}) == 1


def test_a_completion_is_of_text() -> None:
    llm, engine = model()
    for ask in (
        llm.complete,
        llm.stream_complete,
        lambda prompt: asyncio.run(llm.acomplete(prompt)),
    ):
        with pytest.raises(PromptError, match="a str, not NoneType"):
            ask(None)  # type: ignore[arg-type]
    assert not engine.calls


def test_errors_come_through() -> None:
    def fail(prompt: Prompt) -> str:
        raise PromptError("no")

    llm, _ = model(FakeEngine(fail))
    with pytest.raises(PromptError):
        llm.chat(MESSAGES)
    with pytest.raises(PromptError):
        list(llm.stream_chat(MESSAGES))


# ---- the engine -----------------------------------------------------------------------------


class Engines:
    """Stands in for the one place where engines come from."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.made: list[FakeEngine] = []
        self.delay_s = delay_s

    def __call__(self, spec: Any) -> FakeEngine:
        time.sleep(self.delay_s)
        self.made.append(FakeEngine("yes", model=spec.model))
        return self.made[-1]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Engines()
    monkeypatch.setattr(shared_engines, "create_engine", made)
    yield made
    shared_engines.close_all()


def test_the_engine_starts_at_first_use_and_is_shared(engines: Engines) -> None:
    one, two = MiniPIC(model="m"), MiniPIC(model="m", temperature=0)
    metadata = one.metadata
    assert metadata.is_chat_model
    assert metadata.model_name == "m"
    assert one.to_payload()
    assert not engines.made
    assert metadata.context_window == 4096
    assert len(engines.made) == 1
    two.chat(MESSAGES)
    assert len(engines.made) == 1
    one.close()
    one.close()
    assert not engines.made[0].closed
    with pytest.raises(EngineClosedError):
        one.chat(MESSAGES)
    two.close()
    assert engines.made[0].closed


def test_a_start_does_not_block_the_event_loop(engines: Engines) -> None:
    engines.delay_s = 1.0
    llm = MiniPIC(model="slow")

    async def main() -> int:
        beats = 0
        task = asyncio.create_task(llm.achat(MESSAGES))
        while not task.done():
            await asyncio.sleep(0.01)
            beats += 1
        assert task.result().message.content == "yes"
        return beats

    assert asyncio.run(main()) > 20


@pytest.mark.parametrize("asked_first", [True, False])
def test_copies_share_the_engine_unless_they_ask_for_another(
    engines: Engines, asked_first: bool
) -> None:
    llm = MiniPIC(model="m")
    if asked_first:
        llm.chat(MESSAGES)
    same = [
        copy.copy(llm),
        copy.deepcopy(llm),
        llm.model_copy(update={"temperature": 0.5}),
        llm.model_copy(deep=True),
    ]
    other = llm.model_copy(update={"model": "other"})
    own = llm.model_copy(update={"engine": FakeEngine("own")})
    found = [one._get_engine() for one in (llm, *same, other, own)]
    assert len({id(engine) for engine in found[:5]}) == 1
    assert len({id(engine) for engine in found}) == 3
    llm.close()
    for one in same:
        with pytest.raises(EngineClosedError):
            one.chat(MESSAGES)
    for one in (other, own):
        one.chat(MESSAGES)
        one.close()
    assert all(engine.closed for engine in engines.made)


def test_what_closing_calls_belongs_to_those_on_the_engine(engines: Engines) -> None:
    llm = MiniPIC(model="m")
    calls: list[str] = []
    llm.call_on_close(lambda: calls.append("closed"))
    llm.model_copy(update={"model": "other"}).close()
    assert calls == []
    llm.model_copy(deep=True).close()
    assert calls == ["closed"]
    llm.close()
    assert calls == ["closed"]


def test_an_engine_of_ones_own_is_not_closed() -> None:
    llm, engine = model()
    with llm:
        llm.chat(MESSAGES)
    assert not engine.closed
    with pytest.raises(EngineClosedError):
        llm.chat(MESSAGES)


def test_install_sets_llamaindex_up_until_the_model_is_closed() -> None:
    import llama_index.core
    from llama_index.core.utils import get_tokenizer

    with install(Settings, model()[0]) as llm:
        assert Settings.llm is llm
        assert Settings.context_window == 4096
        assert Settings.num_output == 256
        assert get_tokenizer()("a b c") == llm.token_ids("a b c")
        assert Settings._prompt_helper.repack(PromptTemplate("{context_str}"), ["x"]) == ["x"]
    assert Settings._llm is Settings._prompt_helper is Settings._chat_prompt_helper is None
    assert llama_index.core.global_tokenizer is None
    get_tokenizer()("a b c")  # LlamaIndex's own again
    llama_index.core.global_tokenizer = None

    one = install(Settings, model()[0], tokenizer=False)
    assert llama_index.core.global_tokenizer is None
    with install(Settings, model()[0], tokenizer=False) as two:
        one.close()
        assert Settings.llm is two


@pytest.mark.parametrize("given", ["a model's name", Settings])
def test_install_wants_the_model(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"install\(Settings, MiniPIC"):
        install(Settings, given)


def test_importing_starts_nothing_and_leaves_no_noise() -> None:
    """Nor does it import vLLM, torch or LangChain."""
    code = (
        "import sys; import llama_index.llms.minipic as m; m.MiniPIC(model='x');"
        "print([n for n in ('vllm', 'torch', 'langchain_minipic') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert not done.stderr
