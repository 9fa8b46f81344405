"""The remote engine against a server in a few lines: no socket, no vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_vllm import ANSWER, DONE, MODEL, FakeVLLM, event, make_tokenizer, usage
from pydantic import SecretStr

from minipic_backend import (
    ConfigurationError,
    ContextWindowError,
    EngineClosedError,
    EngineError,
    EngineProtocol,
    MalformedSpansError,
    Message,
    PluginMissingError,
    Prompt,
    PromptError,
    RemoteEngine,
    RequestAbortedError,
    ServerTimeoutError,
    ServerUnreachableError,
    Span,
    Text,
)
from minipic_backend.config import SpanOptions
from minipic_backend.engines.shared import EngineSpec, create_engine
from minipic_backend.remote.retries import Retries

PROMPT = Prompt.chat([Message("user", [Span("A document."), Span("Another."), Text("What?")])])
URL = "http://server.test/v1"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIPIC_CACHE", str(tmp_path))
    monkeypatch.delenv("MINIPIC_API_KEY", raising=False)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Back-off without the waiting; what it would have been."""
    waits: list[float] = []
    real = Retries.delay_s

    def delay_s(self: Retries, attempt: int, asked_s: float | None = None) -> float:
        waits.append(real(self, attempt, asked_s))
        return 0.0

    monkeypatch.setattr(Retries, "delay_s", delay_s)
    return waits


@pytest.fixture
def server() -> FakeVLLM:
    return FakeVLLM()


@pytest.fixture
def engine(server: FakeVLLM) -> Iterator[RemoteEngine]:
    with RemoteEngine(URL, http=server) as engine:
        yield engine


def connect(server: FakeVLLM, **options: Any) -> RemoteEngine:
    return RemoteEngine(URL, http=server, **options)


# ---- the handshake --------------------------------------------------------------------------


def test_nothing_is_sent_before_first_use_and_the_server_is_asked_once(
    server: FakeVLLM, engine: RemoteEngine
) -> None:
    assert server.paths == []
    assert isinstance(engine, EngineProtocol)
    assert engine.max_model_len == 2048
    assert (engine.model, engine.block_size) == (MODEL, 16)
    engine.generate(PROMPT)
    engine.generate("Hello")
    assert server.paths.count("/v1/minipic") == 1
    assert server.paths.count("/v1/minipic/tokenizer") == 1


def test_the_tokenizer_is_fetched_once_for_all_engines(server: FakeVLLM) -> None:
    for _ in range(2):
        with connect(server) as engine:
            assert engine.token_ids("abc") == engine.layout.encoder.encode("abc")
    assert server.paths.count("/v1/minipic/tokenizer") == 1


def test_a_tampered_copy_of_the_tokenizer_is_noticed(server: FakeVLLM, tmp_path: Path) -> None:
    with connect(server) as engine:
        engine.count_tokens("x")
    (path,) = tmp_path.glob("tokenizers/*/tokenizer_config.json")
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "chat_template": "{{ messages[0].content }}"}))
    for template in path.parent.glob("*.jinja"):
        template.write_text("{{ messages[0].content }}")
    with connect(server) as engine, pytest.raises(ConfigurationError, match="kept in"):
        engine.count_tokens("x")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"protocol": 99}, "same version on both sides"),
        ({"config": {"speed": 1}}, "cannot be read"),
        ({"models": ["another"]}, "serves another, not a-model"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(changed: dict[str, Any], words: str) -> None:
    server = FakeVLLM(capability=changed)
    with connect(server, model=MODEL) as engine, pytest.raises(ConfigurationError, match=words):
        engine.generate(PROMPT)
    assert server.requests == []


def test_something_else_at_the_address() -> None:
    server = FakeVLLM()
    server.capability = {"hello": "world"}
    with connect(server) as engine, pytest.raises(ConfigurationError, match="base_url right"):
        engine.generate(PROMPT)


def test_another_key_encoding_is_refused(server: FakeVLLM) -> None:
    with (
        connect(server, key_encoding="unrotated") as engine,
        pytest.raises(ConfigurationError, match="--key-encoding unrotated"),
    ):
        engine.generate(PROMPT)


def test_another_tokenizer_is_refused(server: FakeVLLM) -> None:
    other = make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    with (
        connect(server, tokenizer=other) as engine,
        pytest.raises(ConfigurationError, match="not the one that the server uses"),
    ):
        engine.generate(PROMPT)
    with connect(server, tokenizer=make_tokenizer()) as engine:
        assert engine.generate(PROMPT).text == "Teutberga"


def test_frame_that_the_server_does_not_know() -> None:
    server = FakeVLLM(capability={"frames": ["none"]})
    with connect(server) as engine:
        with pytest.raises(ConfigurationError, match=r"frame='prefix'.*none"):
            engine.generate(PROMPT)
        assert engine.generate(PROMPT, technique="block_attention").text == "Teutberga"


def test_a_stock_server_is_told_apart() -> None:
    server = FakeVLLM(plugin=False)
    with connect(server) as engine, pytest.raises(PluginMissingError, match="minipic serve"):
        engine.generate(PROMPT)


def test_a_stock_server_gets_ordinary_prompts_where_that_is_wanted() -> None:
    server = FakeVLLM(plugin=False)
    tokenizer = make_tokenizer()
    with connect(server, on_missing_plugin="plain", tokenizer=tokenizer) as engine:
        assert engine.generate(PROMPT).text == "Teutberga"
        assert engine.capability is None
        assert engine.warm(["A document."]).num_spans == 0
        assert [row.kind for row in engine.explain(PROMPT).rows] == ["prompt"]
    (request,) = server.requests
    assert "vllm_xargs" not in request
    text = tokenizer.decode(request["prompt"])
    assert "A document.\n\nAnother.\n\n" in text
    assert "reserved" not in text


# ---- requests -------------------------------------------------------------------------------


def test_what_is_sent(server: FakeVLLM) -> None:
    options = {"api_key": "secret", "headers": {"x-team": "blue"}, "cache_salt": "tenant"}
    with connect(server, **options) as engine:
        engine.generate(
            PROMPT, temperature=0.5, seed=3, stop=["\n"], logprobs=2, offsets="padded", priority=2
        )
        engine.generate(PROMPT, cache_salt="other", max_tokens=7)
        laid_out = list(engine.explain(PROMPT, offsets="padded").token_ids)
    first, second = server.requests
    assert first["prompt"] == laid_out
    assert first["model"] == MODEL
    assert first["cache_salt"] == "tenant"
    assert first["priority"] == 2
    assert (first["temperature"], first["seed"], first["stop"]) == (0.5, 3, ["\n"])
    assert first["logprobs"] == 2
    assert first["return_tokens_as_token_ids"] is True
    assert first["max_tokens"] == 2048 - len(laid_out)
    options = SpanOptions.from_dict(json.loads(first["vllm_xargs"]["minipic"]))
    assert options == SpanOptions("prefix", "padded", seen_prefix=8)
    assert (second["cache_salt"], second["max_tokens"]) == ("other", 7)
    assert server.headers[-1]["authorization"] == "Bearer secret"
    assert server.headers[-1]["x-team"] == "blue"


def test_the_servers_own_default_of_new_tokens() -> None:
    server = FakeVLLM(capability={"sampling_defaults": {"max_tokens": 40}})
    with connect(server) as engine:
        engine.generate(PROMPT)
    assert server.requests[0]["max_tokens"] == 40


def test_api_key_of_the_environment(server: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIPIC_API_KEY", "from-env")
    with connect(server) as engine:
        engine.count_tokens("x")
    assert server.headers[-1]["authorization"] == "Bearer from-env"


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"api_key": key}
            for key in ("sk-“secret”", "schlüssel", "a\nb", "key\n", " key", "\ud800")
        ),
        {"headers": {"x-team": "blå"}},
        {"headers": {"x-teäm": "blue"}},
        {"headers": {"x-team": "blue\r\nx: y"}},
        {"headers": {"x-team": 3}},
    ],
    ids=ascii,
)
def test_what_no_header_can_carry_is_refused_and_not_shown(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=r"header|str") as caught:
        RemoteEngine(URL, **options)
    assert not any(value in str(caught.value) for value in ("secret", "schl", "blå", "blue"))
    if key := options.get("api_key"):
        if key.isprintable():
            monkeypatch.setenv("MINIPIC_API_KEY", key)
            with pytest.raises(ConfigurationError, match="api_key has U\\+"):
                RemoteEngine(URL)
        with pytest.raises(ConfigurationError, match="api_key has U\\+"):
            RemoteEngine(URL, api_key=SecretStr(key))


@pytest.mark.parametrize("plugin", [True, False])
@pytest.mark.parametrize("on_missing_plugin", ["error", "plain"])
def test_an_address_without_v1(plugin: bool, on_missing_plugin: Any) -> None:
    server = FakeVLLM(plugin=plugin)
    for address in ("http://server.test", "http://server.test/", "http://server.test/v2"):
        with (
            RemoteEngine(address, http=server, on_missing_plugin=on_missing_plugin) as engine,
            pytest.raises(ConfigurationError, match=r"with its /v1; try http://server\.test/v1$"),
        ):
            engine.generate(PROMPT)
    with (
        RemoteEngine("http://server.test/other/v1", http=server) as engine,
        pytest.raises(ConfigurationError, match="is it vLLM's"),
    ):
        engine.generate(PROMPT)


def test_the_key_is_never_shown(server: FakeVLLM) -> None:
    with connect(server, api_key="secret") as engine:
        assert "secret" not in repr(engine)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speed": 3}, "speed"),
        ({"temperature": float("inf")}, "JSON"),
        ({"stop": {"a"}}, "JSON"),
        ({"technique": "magic"}, "primed"),
        ({"request_id": ["x"]}, "request_id.*expected str"),
        ({"request_id": 3}, "request_id.*expected str"),
        ({"cache_salt": b"x"}, "cache_salt.*expected str"),
        ({"priority": "high"}, "priority.*expected int"),
        ({"priority": True}, "priority.*expected int"),
    ],
    ids=str,
)
def test_options_that_mean_nothing(
    engine: RemoteEngine, server: FakeVLLM, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        engine.generate(PROMPT, **options)
    assert server.requests == []


@pytest.mark.parametrize(
    "options",
    [
        {"max_retries": -1},
        {"on_missing_plugin": "panic"},
        {"technique": "magic"},
        {"timeout": 0},
        {"timeout": "soon"},
    ],
    ids=str,
)
def test_bad_options_of_the_engine(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        RemoteEngine(URL, **options)
    with pytest.raises(ConfigurationError, match="http://host:8000/v1"):
        RemoteEngine("host:8000/v1")


def test_prompt_over_the_context(engine: RemoteEngine, server: FakeVLLM) -> None:
    with pytest.raises(ContextWindowError):
        engine.generate("word " * 2048)
    assert server.requests == []


# ---- answers --------------------------------------------------------------------------------


def test_result_and_usage(engine: RemoteEngine) -> None:
    result = engine.generate(PROMPT)
    assert (result.text, result.token_ids, result.finish_reason) == ("Teutberga", (5, 6), "stop")
    tokens = result.usage.prompt_tokens
    assert tokens == len(engine.explain(PROMPT).token_ids)
    assert result.usage.completion_tokens == 2
    assert result.usage.cached_tokens == 16
    assert result.usage.cache_creation_tokens == tokens // 16 * 16 - 16
    assert result.usage.pad_tokens == sum(row.num_pads for row in engine.explain(PROMPT).rows)
    assert 0 < result.timing.ttft_s <= result.timing.total_s


def test_stream_carries_usage_on_its_last_piece_alone(engine: RemoteEngine) -> None:
    chunks = list(engine.stream(PROMPT))
    assert [chunk.text for chunk in chunks] == ["Teut", "berga"]
    assert [chunk.usage is None for chunk in chunks] == [True, False]
    assert chunks[-1].finish_reason == "stop"


def test_cached_tokens_that_are_not_reported_are_absent_not_zero() -> None:
    server = FakeVLLM(script=[[event("a", 5, finish_reason="stop"), usage(), DONE]])
    with connect(server) as engine, pytest.warns(UserWarning, match="prompt-tokens-details"):
        result = engine.generate(PROMPT)
    assert result.usage.cached_tokens is None
    assert result.usage.cache_creation_tokens is None


def test_cached_tokens_of_zero_are_zero() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    server = FakeVLLM(script=[[event("a", 5, finish_reason="stop"), usage(**details), DONE]])
    with connect(server) as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.generate(PROMPT).usage.cached_tokens == 0


def test_logprobs() -> None:
    logprobs = {"top_logprobs": [{"token_id:5": -0.25, "token_id:9": -2.0}]}
    answer = [event("a", 5, logprobs=logprobs, finish_reason="length"), usage(), DONE]
    with connect(FakeVLLM(script=[answer])) as engine, pytest.warns(UserWarning, match="cached"):
        (completion,) = engine.generate(PROMPT, logprobs=1).completions
    assert completion.logprobs == ({5: -0.25, 9: -2.0},)


def test_several_completions() -> None:
    answer = [
        event("a", 5),
        event("b", 6, index=1),
        event("c", 7, index=1, finish_reason="stop", stop_reason="c"),
        event("d", 8, finish_reason="length"),
        *ANSWER[-2:],
    ]
    with connect(FakeVLLM(script=[answer] * 2)) as engine:
        result = engine.generate(PROMPT, n=2)
        chunks = list(engine.stream(PROMPT, n=2))
    assert [one.text for one in result.completions] == ["ad", "bc"]
    assert [one.finish_reason for one in result.completions] == ["length", "stop"]
    assert result.completions[1].stop_reason == "c"
    assert result.usage.completion_tokens == 4
    assert [chunk.usage is not None for chunk in chunks] == [False, False, False, True]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_cut_anywhere_and_line_ends_inside_texts(size: int) -> None:
    """U+2028, U+0085 and the like end a line for Python, not for events."""
    text = "a\u2028b\u0085c\x0bd\u2029é🙂"
    body = ": keep-alive\r\n\r\n" + "".join([event(text, 5, finish_reason="stop"), *ANSWER[-2:]])
    data = body.replace("\n\n", "\r\n\r\n").encode()
    pieces = [data[i : i + size] for i in range(0, len(data), size)]

    class Pieces(FakeVLLM):
        def _answer(self, entry: Any) -> httpx.Response:
            async def content() -> Any:
                for piece in pieces:
                    yield piece

            return httpx.Response(200, content=content())

    with connect(Pieces()) as engine:
        assert engine.generate(PROMPT).text == text


# ---- faults ---------------------------------------------------------------------------------

LOST = httpx.ReadError("reset")
BUSY = httpx.Response(503, json={"error": {"message": "later", "code": 503}})


@pytest.mark.parametrize(
    "fault",
    [
        httpx.ConnectError("refused"),
        httpx.RemoteProtocolError("closed"),
        LOST,
        BUSY,
        httpx.Response(429, headers={"retry-after": "3"}, json={}),
        [LOST],
    ],
    ids=["refused", "stale", "reset", "503", "429", "no token yet"],
)
def test_sent_again(fault: Any, no_waiting: list[float]) -> None:
    server = FakeVLLM(script=[fault, fault, ANSWER])
    with connect(server) as engine:
        assert engine.generate(PROMPT).text == "Teutberga"
    assert len(server.requests) == 3
    assert len(no_waiting) == 2
    if isinstance(fault, httpx.Response) and fault.status_code == 429:
        assert min(no_waiting) >= 3.0
    else:
        assert 0.3 < no_waiting[0] < no_waiting[1] < 1.3


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (httpx.ConnectError("refused"), ServerUnreachableError),
        (LOST, ServerUnreachableError),
        (BUSY, EngineError),
    ],
    ids=["refused", "reset", "503"],
)
def test_not_for_ever(fault: Any, error: type[Exception]) -> None:
    server = FakeVLLM(script=[fault])
    with connect(server, max_retries=1) as engine, pytest.raises(error):
        engine.generate(PROMPT)
    assert len(server.requests) == 2


@pytest.mark.parametrize("end", [LOST, None], ids=["reset", "cut off"])
def test_never_sent_again_after_a_token(end: Exception | None) -> None:
    steps: list[Any] = [event("Teut", 5), *([end] if end else [])]
    server = FakeVLLM(script=[steps, ANSWER])
    with connect(server) as engine:
        stream = engine.stream(PROMPT)
        assert next(stream).text == "Teut"
        with pytest.raises(ServerUnreachableError, match="lost before the answer ended"):
            next(stream)
        assert len(server.requests) == 1
        assert engine.generate(PROMPT).text == "Teutberga"


@pytest.mark.parametrize(
    ("status", "message", "error"),
    [
        (400, "Marker token 3 stands inside a block (token index 70)", MalformedSpansError),
        (400, "too long", PromptError),
        (401, "Unauthorized", ConfigurationError),
        (404, "no such model", ConfigurationError),
        (500, "broken", EngineError),
    ],
)
def test_refusals_are_not_retried(status: int, message: str, error: type[Exception]) -> None:
    body = {"error": {"message": message, "code": status}}
    server = FakeVLLM(script=[httpx.Response(status, json=body)])
    with connect(server) as engine, pytest.raises(error, match="(?s)" + message[:12]) as caught:
        engine.generate(PROMPT)
    assert len(server.requests) == 1
    if isinstance(caught.value, MalformedSpansError):
        assert caught.value.token_index == 70
        assert str(caught.value) == message


def test_sampling_options_that_the_server_refuses() -> None:
    body = {"error": {"message": "temperature must be non-negative", "param": "temperature"}}
    server = FakeVLLM(script=[httpx.Response(400, json=body)])
    with connect(server) as engine, pytest.raises(ConfigurationError, match="temperature"):
        engine.generate(PROMPT, temperature=-1.0)


def test_error_in_the_middle_of_a_stream() -> None:
    fault = 'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
    server = FakeVLLM(script=[[event("Teut", 5), fault, DONE]])
    with connect(server) as engine, pytest.raises(EngineError, match="out of memory"):
        engine.generate(PROMPT)


@pytest.mark.parametrize("body", ["data: {\n\n", "data: 3\n\n", 'data: {"choices": 3}\n\n'])
def test_what_is_no_answer(body: str) -> None:
    with connect(FakeVLLM(script=[[body, DONE]])) as engine, pytest.raises(EngineError):
        engine.generate(PROMPT)


def test_a_silent_server() -> None:
    timeout = httpx.ReadTimeout("silent")
    server = FakeVLLM(script=[[event("Teut", 5), timeout]])
    with connect(server) as engine, pytest.raises(ServerTimeoutError) as caught:
        engine.generate(PROMPT)
    assert isinstance(caught.value, TimeoutError)
    server = FakeVLLM(script=[timeout])
    with connect(server) as engine, pytest.raises(ServerTimeoutError):
        engine.generate(PROMPT)
    assert len(server.requests) == 1  # it may be at work on the first


# ---- aborting, loops, life ------------------------------------------------------------------

ENDLESS = [event("a", 5), 600.0]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_leaving_a_stream_drops_its_connection() -> None:
    server = FakeVLLM(script=[ENDLESS])
    with connect(server) as engine:
        stream = engine.stream(PROMPT)
        next(stream)
        assert server.closed_streams == 0
        stream.close()
        wait_for(lambda: server.closed_streams == 1)


def test_abort_by_id() -> None:
    server = FakeVLLM(script=[ENDLESS])
    with connect(server) as engine:
        stream = engine.stream(PROMPT, request_id="mine")
        next(stream)
        assert server.requests[0]["request_id"] == "mine"
        engine.abort("mine")
        with pytest.raises(RequestAbortedError, match="mine"):
            next(stream)
        for unknown in ("mine", "never-was", ["mine"], None):
            engine.abort(unknown)


@pytest.mark.parametrize(
    ("end", "error"), [("abort", RequestAbortedError), ("close", EngineClosedError)]
)
def test_an_end_that_comes_before_the_beginning(end: str, error: type[Exception]) -> None:
    """The request is not on its way yet when it is aborted; whoever waits for it is told."""
    with connect(FakeVLLM(script=[ANSWER, ENDLESS])) as engine:
        engine.generate(PROMPT)
        loop, go_on = engine._transport._loop, threading.Event()
        assert loop is not None
        loop.call(go_on.wait)
        handle, _ = engine._submit(engine._prepare(PROMPT, {"request_id": "mine"}))
        ends: Any = {"abort": lambda: engine.abort("mine"), "close": engine.close}
        thread = threading.Thread(target=ends[end])
        thread.start()
        wait_for(lambda: engine._transport.closed or not thread.is_alive())
        go_on.set()
        while not isinstance(told := handle._items.get(timeout=10), Exception):
            pass
        assert isinstance(told, error)
        thread.join()


def test_an_answer_does_not_wait_for_the_end_of_its_body() -> None:
    """Which is read all the same, so that the connection can serve others."""
    server = FakeVLLM(script=[[*ANSWER, 600.0]])
    with connect(server) as engine:
        for _ in range(2):
            assert engine.generate(PROMPT, request_id="mine").text == "Teutberga"
        assert server.closed_streams == 0
    assert server.closed_streams == 2


def test_a_request_id_in_use() -> None:
    with connect(FakeVLLM(script=[ENDLESS])) as engine:
        stream = engine.stream(PROMPT, request_id="mine")
        next(stream)
        with pytest.raises(PromptError, match="already in use"):
            engine.generate(PROMPT, request_id="mine")


def test_cancelled_tasks_drop_their_connections() -> None:
    server = FakeVLLM(script=[ENDLESS])

    async def run(engine: RemoteEngine) -> None:
        task = asyncio.create_task(engine.agenerate([PROMPT] * 3))
        while len(server.requests) < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with connect(server) as engine:
        asyncio.run(run(engine))
        wait_for(lambda: server.closed_streams == 3)


def test_one_engine_on_several_event_loops() -> None:
    async def run(engine: RemoteEngine) -> list[str]:
        streamed = [chunk.text async for chunk in engine.astream(PROMPT)]
        several = await engine.agenerate([PROMPT, "Hello"])
        return [*streamed, *(result.text for result in several)]

    with connect(FakeVLLM()) as engine:
        for _ in range(3):
            assert asyncio.run(run(engine)) == ["Teut", "berga", "Teutberga", "Teutberga"]
        assert engine.generate(PROMPT).text == "Teutberga"


def test_a_list_runs_together() -> None:
    """No answer ends before all requests have come."""
    server = FakeVLLM()
    answer = server._answer

    def held(entry: Any) -> httpx.Response:
        response = answer([])

        async def content() -> Any:
            while len(server.requests) < 20:
                await asyncio.sleep(0.01)
            for piece in ANSWER:
                yield piece.encode()

        response.stream = httpx.Response(200, content=content()).stream
        return response

    server._answer = held  # type: ignore[method-assign]
    with connect(server) as engine:
        results = engine.generate(["Hello"] * 20)
    assert [result.text for result in results] == ["Teutberga"] * 20
    assert len({result.request_id for result in results}) == 20


def test_a_failing_prompt_of_a_list_leaves_nothing_running() -> None:
    bad = httpx.Response(400, json={"error": {"message": "no"}})
    server = FakeVLLM(script=[bad, ENDLESS])
    with connect(server) as engine:
        with pytest.raises(PromptError):
            engine.generate(["Hello"] * 3)
        wait_for(lambda: not engine._transport._tasks)


def test_closing() -> None:
    server = FakeVLLM(script=[ENDLESS])
    engine = connect(server)
    stream = engine.stream(PROMPT)
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosedError, match="before the request finished"):
        next(stream)
    with pytest.raises(EngineClosedError):
        engine.generate(PROMPT)
    assert "closed" in repr(engine)
    assert server.closed_streams == 1


def test_warming_documents_of_any_length_that_the_context_holds() -> None:
    server = FakeVLLM(capability={"max_model_len": 8192})
    with connect(server, technique="block_attention") as engine:
        for num_tokens in (1000, 2100, 5000, 8100):
            text = "x" * num_tokens
            assert num_tokens <= engine.count_tokens(text) <= 8150
            assert engine.warm(["Before.", text, "Behind."]).num_spans == 3
        sent = [len(request["prompt"]) for request in server.requests]
        assert max(sent) > 8100
        with pytest.raises(ContextWindowError, match="holds 8192"):
            engine.warm(["x" * 8192])


def test_warming() -> None:
    server = FakeVLLM()
    with connect(server, cache_salt="tenant") as engine:
        with pytest.raises(PromptError, match="met none yet"):
            engine.warm(["A document."])
        report = engine.warm(["A document.", "Another."], prompt=PROMPT)
    assert report.num_spans == 2
    assert report.num_cached_tokens == 16
    (request,) = server.requests
    assert (request["max_tokens"], request["temperature"]) == (1, 0.0)
    assert request["cache_salt"] == "tenant"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"technique": "epic_paper"}, "nothing to warm.*'epic'"),
        ({"technique": "epic_paper", "blocks": 2, "frame": "prefix"}, "nothing to warm"),
        ({"technique": "prompt_cache"}, "modules of a schema"),
    ],
    ids=str,
)
def test_what_no_prompt_would_read_is_not_warmed(options: dict[str, Any], words: str) -> None:
    server = FakeVLLM()
    with connect(server) as engine:
        with pytest.raises(ConfigurationError, match=words):
            engine.warm(["A document."], prompt=PROMPT, **options)
        assert server.requests == []
        # Without heads a document is whole again.
        assert engine.warm(["A document."], technique="epic_paper", blocks=0).num_spans == 1


def test_shared_engines_reach_it() -> None:
    client = {"api_key": "k", "timeout": 3.0, "max_retries": 1, "headers": {"a": "b"}}
    spec = EngineSpec(MODEL, URL, {}, {**client, "on_missing_plugin": "plain"})
    engine = create_engine(spec)
    assert isinstance(engine, RemoteEngine)
    assert (engine.base_url, engine.model) == (URL, MODEL)
    engine.close()
    with pytest.raises(ConfigurationError, match="max_num_seqs"):
        create_engine(EngineSpec(MODEL, URL, {"max_num_seqs": 3}, {}))


def test_neither_torch_nor_vllm_is_needed(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["vllm"] = None  # as if they were not installed
from fake_vllm import FakeVLLM
from minipic_backend import RemoteEngine, Message, Prompt, Span, Text
prompt = Prompt.chat([Message("user", [Span("A document."), Text("What?")])])
with RemoteEngine("http://server.test/v1", http=FakeVLLM()) as engine:
    print(engine.generate(prompt).text, engine.explain(prompt).rows[0].kind)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "MINIPIC_CACHE": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)]),
        },
    )
    assert done.stdout.split() == ["Teutberga", "prefix"], done.stderr[-2000:]
