"""What is wrong is answered with a 4xx that says so; the server goes on serving."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from documents import chat, fresh
from process import ServerProcess

from minipic_backend import MalformedSpansError, PromptError, RemoteEngine
from minipic_backend.models import HUB_NAME

TEXT = {"type": "text", "text": "x"}


@pytest.fixture(autouse=True)
def still_serving(remote: RemoteEngine) -> Iterator[None]:
    yield
    assert remote.generate("Hello", max_tokens=2, temperature=0.0).usage.completion_tokens == 2


def refused(answer: Any, *words: str) -> None:
    assert 400 <= answer.status_code < 500, answer.text
    message = json.dumps(answer.json())
    for word in words:
        assert word in message


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def complete(request: pytest.FixtureRequest, server: ServerProcess) -> Any:
    """POST a prompt of token ids; the status is an error's even where a stream was asked for."""

    def post(prompt: Any, **options: Any) -> Any:
        body = {"model": HUB_NAME, "prompt": prompt, "max_tokens": 3, "stream": request.param}
        return server.request("POST", "/completions", json={**body, **options})

    return post


@pytest.fixture
def say(server: ServerProcess) -> Any:
    def post(*content: Any, **options: Any) -> Any:
        messages = [{"role": "user", "content": list(content)}]
        body = {"model": HUB_NAME, "messages": messages, "max_tokens": 3, **options}
        return server.request("POST", "/chat/completions", json=body)

    return post


# ---- token ids ------------------------------------------------------------------------------


@pytest.mark.parametrize("marker", ["ssep", "pdep"])
def test_marker_inside_a_block(complete: Any, remote: RemoteEngine, marker: str) -> None:
    prompt = list(remote.explain(chat(fresh(2))).token_ids)
    prompt[70] = getattr(remote.capability.config, marker)  # type: ignore[union-attr]
    refused(complete(prompt), "inside a block", "token index 70")


def test_pad_in_the_middle(complete: Any, remote: RemoteEngine) -> None:
    prompt = list(remote.explain(chat(fresh(2)), late=0).token_ids)
    prompt[3] = remote.capability.config.pad  # type: ignore[union-attr]
    refused(complete(prompt), "pad", "token index 3")


def test_prompt_that_ends_in_a_span(complete: Any, remote: RemoteEngine) -> None:
    laid_out = remote.explain(chat(fresh(2)), late=0)
    prompt = laid_out.token_ids[: -laid_out.rows[-1].num_tokens]
    refused(complete(list(prompt)), "ends in a span")


def test_a_bad_prompt_among_good_ones(complete: Any, remote: RemoteEngine) -> None:
    bad = [10, remote.capability.config.ssep]  # type: ignore[union-attr]
    refused(complete([[10, 20], bad, [30]]), "token index 1")


def test_markers_out_of_the_vocabulary(complete: Any) -> None:
    refused(complete([10, 2_000_000]), "2000000")


def test_negative_tokens(complete: Any) -> None:
    refused(complete([10, -1]), "greater than or equal to 0")


def test_a_prompt_of_a_million_tokens(complete: Any) -> None:
    refused(complete([10] * 1_000_000), "2048")


def test_spans_over_the_context(complete: Any, remote: RemoteEngine) -> None:
    config = remote.capability.config  # type: ignore[union-attr]
    span = [config.ssep, *[10] * (config.block_size - 1)]
    refused(complete([*span * 70, config.pdep, 10]), "2048")


def test_ten_thousand_spans(complete: Any, remote: RemoteEngine) -> None:
    config = remote.capability.config  # type: ignore[union-attr]
    span = [config.ssep, *[10] * (config.block_size - 1)]
    refused(complete([*span * 10_000, config.pdep, 10]), "2048")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"frame": "both"}, "none, prefix"),
        ({"offsets": -5}, "compact, padded"),
        ({"offsets": "negative"}, "compact, padded"),
        ({"see_markers": "no"}, "True or False"),
        ({"speed": "high"}, "speed"),
        (["frame"], "expected options"),
        (-3, "expected options"),
    ],
    ids=str,
)
def test_span_options_that_mean_nothing(complete: Any, options: Any, words: str) -> None:
    refused(complete([10, 20], vllm_xargs={"minipic": json.dumps(options)}), words)


@pytest.mark.parametrize("options", [3, "{", "frame", ["frame", "none"]], ids=str)
def test_span_options_that_are_none(complete: Any, options: Any) -> None:
    refused(complete([10, 20], vllm_xargs={"minipic": options}), "minipic")


@pytest.mark.parametrize("offset", [2048, 10**9, 2**70])
def test_places_past_the_context(complete: Any, remote: RemoteEngine, offset: int) -> None:
    laid_out = remote.explain(chat(fresh(2)), late=0)
    last = laid_out.rows[-1].num_tokens
    places = [[len(laid_out.token_ids) - last, offset]]
    options = {"minipic": json.dumps({"places": places})}
    refused(complete(list(laid_out.token_ids), vllm_xargs=options), "2048")


def test_beams_of_a_prompt_with_spans(complete: Any, remote: RemoteEngine) -> None:
    prompt = list(remote.explain(chat(fresh(1)), late=0).token_ids)
    refused(complete(prompt, use_beam_search=True, n=2), "beam")


def test_text_that_spells_out_a_marker(complete: Any) -> None:
    refused(complete("name <repo_name> name"), "spells out a marker")


def test_other_routes_refuse_misplaced_markers_too(
    server: ServerProcess, remote: RemoteEngine
) -> None:
    import httpx
    from process import API_KEY

    body = {
        "model": HUB_NAME,
        "token_ids": [10, remote.capability.config.ssep],  # type: ignore[union-attr]
        "sampling_params": {"max_tokens": 3},
    }
    answer = httpx.post(
        f"{server.root}/inference/v1/generate",
        json=body,
        headers={"authorization": f"Bearer {API_KEY}"},
        timeout=60,
    )
    refused(answer, "token index 1")


@pytest.mark.parametrize("text", ["x", "name <repo_name> name"], ids=["marked", "spelled out"])
def test_options_that_do_not_go_with_what_is_laid_out(say: Any, text: str) -> None:
    mark = {"minipic": {"span": True}} if text == "x" else {}
    for option in ({"echo": True}, {"use_beam_search": True}, {"truncate_prompt_tokens": 500}):
        refused(say({**TEXT, "text": text, **mark}, TEXT, **option), *option)


@pytest.mark.parametrize("stream", [False, True])
def test_numbers_that_no_engine_can_be_sent(server: ServerProcess, stream: bool) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    for path, body in [
        ("/chat/completions", chat),
        ("/messages", chat),
        ("/responses", {"input": "x"}),
    ]:
        for option in ({"chat_template_kwargs": {"x": [2**64]}}, {"top_k": -(2**64)}):
            body = {"model": HUB_NAME, "stream": stream, **body, **option}
            refused(server.request("POST", path, json=body), *option, "too large")


# ---- marks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mark",
    [
        3, "span", [], {"span": "yes"}, {"span": 1}, {"colour": 1}, {"span": True, "rank": -1},
        {"span": True, "rank": "first"}, {"span": True, "rank": True}, {"span": True, "id": 3},
        {"span": True, "offset": -7},
    ],
    ids=str,
)  # fmt: skip
def test_malformed_marks(say: Any, mark: Any) -> None:
    refused(say({**TEXT, "minipic": mark}, TEXT), "messages[0].content[0].minipic")
    refused(say({**TEXT, "extras": {"minipic": mark}}, TEXT), "content[0].extras.minipic")


def test_marks_on_messages(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "x", "minipic": {"span": True}}]
    body = {"model": HUB_NAME, "messages": messages, "max_tokens": 3}
    answer = server.request("POST", "/chat/completions", json=body)
    refused(answer, "messages[0]: a mark stands on a part of the content")


def test_marks_and_images(say: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    refused(say({**TEXT, "minipic": {"span": True}}, image), "content[1]", "text")


@pytest.mark.parametrize(
    "options", [3, "primed", {"technique": "magic"}, {"late": -1}, {"speed": 1}], ids=str
)
def test_layout_options_that_mean_nothing(say: Any, options: Any) -> None:
    refused(say({**TEXT, "minipic": {"span": True}}, TEXT, minipic=options))


@pytest.mark.parametrize("stream", [False, True])
def test_span_options_of_a_chat_without_marks(say: Any, stream: bool) -> None:
    for options in ([], 3, "{", '{"frame": "both"}'):
        refused(say(TEXT, vllm_xargs={"minipic": options}, stream=stream))


def test_ten_thousand_marks(say: Any) -> None:
    refused(say(*[{**TEXT, "minipic": {"span": True}}] * 10_000, TEXT), "2048")


def test_marked_documents_over_the_context(say: Any) -> None:
    long = {**TEXT, "text": "word " * 3000, "minipic": {"span": True}}
    refused(say(long, TEXT), "2048")


def test_anthropic_documents_that_hold_no_text(server: ServerProcess) -> None:
    for source in ({"type": "base64", "data": "AAAA"}, {"type": "text", "data": 3}, {}, "x"):
        found = [{"type": "document", "source": source}]
        result = {"type": "tool_result", "tool_use_id": "t", "content": found}
        content = [result, TEXT] if source == "x" else [*found, TEXT]
        messages = [{"role": "user", "content": content}]
        body = {"model": HUB_NAME, "messages": messages, "max_tokens": 3}
        answer = server.request("POST", "/messages", json=body)
        refused(answer, "document")
        assert answer.json()["type"] == "error"  # in Anthropic's form


# ---- bodies ---------------------------------------------------------------------------------

PATHS = ["/completions", "/chat/completions", "/messages", "/messages/count_tokens"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"\x00\xff\xfe\x80" * 100, "application/json"),
        (b"\x00\xff\xfe\x80" * 100, "application/octet-stream"),
        (b'{"model": "x"', "application/json"),
        (b"[]", "application/json"),
        (b"null", "application/json"),
        (b"", "application/json"),
        (b"{}", "text/plain"),
        (b"a=b", "application/x-www-form-urlencoded"),
        (b"[" * 50_000, "application/json"),
        (b'{"messages": [{"role": "user", "content": [{"minipic": 1}]}]}', "application/json"),
    ],
    ids=["binary json", "binary", "cut", "list", "null", "empty", "text", "form", "deep", "mark"],
)
def test_bodies_that_are_none(server: ServerProcess, path: str, content: bytes, kind: str) -> None:
    refused(server.request("POST", path, content=content, headers={"content-type": kind}))


@pytest.mark.parametrize("path", ["/minipic", "/minipic/tokenizer"])
def test_our_routes_want_the_key(server: ServerProcess, path: str) -> None:
    answer = server.request("GET", path, headers={"authorization": "Bearer wrong"})
    assert answer.status_code == 401
    assert server.request("POST", path).status_code == 405


def test_refusals_as_our_client_tells_them(remote: RemoteEngine) -> None:
    """Past the layout, which would not have made such a prompt."""
    from dataclasses import replace

    job = remote._prepare("Hello", {"max_tokens": 2})
    ssep = remote.capability.config.ssep  # type: ignore[union-attr]
    bad = replace(job, laid_out=replace(job.laid_out, token_ids=(10, 11, ssep)))
    with pytest.raises(MalformedSpansError) as caught:
        remote._finish(*remote._submit(bad))
    assert caught.value.token_index == 2
    absent = replace(job, laid_out=replace(job.laid_out, token_ids=(10, 2_000_000)))
    with pytest.raises(PromptError, match="vocab"):
        remote._finish(*remote._submit(absent))
