"""The server's renderer of chats and completions on a real tokenizer, without a server."""

from __future__ import annotations

import json
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from pydantic import BaseModel
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
from vllm.platforms import current_platform
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.renderers.registry import renderer_from_config
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor

from minipic_backend import (
    ConfigurationError,
    EngineError,
    MiniPICError,
    PromptError,
)
from minipic_backend.choices import LAYOUT_DEFAULTS
from minipic_backend.config import CONFIG_KEY, SpanConfig
from minipic_backend.layout.markers import choose_markers
from minipic_backend.models import ensure_smollm2
from minipic_backend.plugin import seams
from minipic_backend.plugin.hasher import request_segments
from minipic_backend.plugin.requests import (
    RequestRefused,
    as_received,
    check_request,
    refuse_depth,
)
from minipic_backend.server.rendering import SpanRenderer, take_over
from minipic_backend.server.routes import Facts

BLOCK = 32
QUESTION = {"type": "text", "text": "What is this about?"}
SPAN = {"type": "text", "text": "A document.", "minipic": {"span": True}}


@pytest.fixture(scope="module")
def renderer() -> Any:
    model = EngineArgs(model=str(ensure_smollm2(progress=False))).create_engine_config()
    online = OnlineRenderer(
        model.model_config,
        renderer_from_config(model),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
    )
    tokenizer = online.renderer.get_tokenizer()
    chosen = choose_markers(tokenizer)
    config = SpanConfig(chosen.ssep, chosen.pdep, chosen.pad, block_size=BLOCK)
    facts = Facts(config, tokenizer, None, 2048, {}, True)
    take_over(online, SpanRenderer(facts, LAYOUT_DEFAULTS))
    online.span_config = config
    yield online
    online.renderer.shutdown()


@pytest.fixture(scope="module")
def marker_text(renderer: Any) -> str:
    name = renderer.renderer.get_tokenizer().convert_ids_to_tokens(renderer.span_config.ssep)
    return f"The token {name} is only text."


async def ids_of(renderer: Any, request: Any) -> list[int]:
    """Token ids of a chat, as the routes ask for them."""
    _, (found,) = await renderer.preprocess_chat(request, request.messages, None, "auto", {})
    return list(found["prompt_token_ids"])


def chat(*content: Any, kind: Any = ChatCompletionRequest, **options: Any) -> Any:
    return kind(model="m", messages=[{"role": "user", "content": list(content)}], **options)


def num_markers(renderer: Any, ids: list[int]) -> int:
    config = renderer.span_config
    return sum(token in (config.ssep, config.pdep) for token in ids)


async def test_echo_is_refused_where_it_would_be_rendered_by_vllm(
    renderer: Any, marker_text: str
) -> None:
    """For an echo vLLM renders the chat itself, and reads markers out of its text."""
    hostile = {"type": "text", "text": marker_text}
    for content in ([SPAN, QUESTION], [{**SPAN, "text": marker_text}, QUESTION], [hostile]):
        with pytest.raises(PromptError, match="echo"):
            await ids_of(renderer, chat(*content, echo=True))
        assert await ids_of(renderer, chat(*content))
    plain = await ids_of(renderer, chat(QUESTION))
    assert await ids_of(renderer, chat(QUESTION, echo=True)) == plain


@pytest.mark.parametrize(
    "options", [{"truncate_prompt_tokens": 100}, {"use_beam_search": True, "n": 2}], ids=str
)
async def test_options_that_ready_ids_know_nothing_of(
    renderer: Any, marker_text: str, options: dict[str, Any]
) -> None:
    """vLLM would leave the prompt as long as it was, or lay its beams out anew."""
    for content in ([SPAN, QUESTION], [{"type": "text", "text": marker_text}]):
        with pytest.raises(PromptError, match=next(iter(options))):
            await ids_of(renderer, chat(*content, **options))
    assert await ids_of(renderer, chat(QUESTION, **options))


async def test_beams_of_a_prompt_with_spans(renderer: Any) -> None:
    """vLLM makes each a prompt of its own, and drops what the request chose about its spans."""
    beams = {"max_tokens": 1, "use_beam_search": True, "n": 2}
    for name in ("spans", "a lone span"):
        ids, _ = prompts(renderer.span_config)[name]
        request = CompletionRequest(model="m", prompt=ids, **beams)
        with pytest.raises(PromptError, match="use_beam_search"):
            await renderer.preprocess_completion(request, ids, None)
    request = CompletionRequest(model="m", prompt=[10, 11], **beams)
    assert await renderer.preprocess_completion(request, [10, 11], None)


async def test_no_part_makes_vllm_render_a_marked_chat(renderer: Any, marker_text: str) -> None:
    """Keys and kinds of parts for which it throws ready token ids away."""
    marked = {**SPAN, "text": marker_text}
    want = await ids_of(renderer, chat(marked, QUESTION))
    assert num_markers(renderer, want) >= 1
    for further in ({"image_url": "x"}, {"image_url": None}, {"input_audio": {}}):
        assert await ids_of(renderer, chat({**marked, **further}, QUESTION)) == want
    thought = {"type": "reasoning", "reasoning": marker_text}
    found = await renderer.preprocess_chat(
        chat(QUESTION), [{"role": "user", "content": [thought, marked, QUESTION]}], None, "auto", {}
    )
    assert list(found[1][0]["prompt_token_ids"]) == want


async def test_what_vllm_renders_in_place_of_the_layout_is_not_served(
    renderer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ignores_ids(*args: Any, **kwargs: Any) -> Any:
        return [], [{"type": "token", "prompt_token_ids": [10, 20]}]

    monkeypatch.setattr(OnlineRenderer, "preprocess_chat", ignores_ids)
    with pytest.raises(EngineError, match="laid out"):
        await ids_of(renderer, chat(SPAN, QUESTION))


async def test_ready_ids_of_a_client_do_not_stay(renderer: Any) -> None:
    want = await ids_of(renderer, chat(SPAN, QUESTION))
    given = {"prompt_token_ids": [10, 20], "other": 1}
    request = chat(SPAN, QUESTION, kv_transfer_params=given)
    assert await ids_of(renderer, request) == want
    assert request.kv_transfer_params == {"other": 1}
    request = chat(SPAN, QUESTION)
    await ids_of(renderer, request)
    assert request.kv_transfer_params is None


async def test_ready_ids_hold_no_markers(renderer: Any) -> None:
    """The messages would be laid out in their place."""
    ids, _ = prompts(renderer.span_config)["spans"]
    for given in (ids, [10, renderer.span_config.pdep]):
        request = chat(QUESTION, kv_transfer_params={"prompt_token_ids": given})
        with pytest.raises(PromptError, match="no markers"):
            await ids_of(renderer, request)
    request = chat(QUESTION, kv_transfer_params={"prompt_token_ids": [10, 20]})
    assert await ids_of(renderer, request) == [10, 20]


async def test_span_options_of_chats_that_are_laid_out(renderer: Any, marker_text: str) -> None:
    """Such a chat has a place of its own for them, and theirs would be lost."""
    hostile = {"type": "text", "text": marker_text}
    for content in ([SPAN, QUESTION], [hostile], [{**SPAN, "text": marker_text}, QUESTION]):
        for value in ('{"frame": "none"}', '{"frame": "both"}', 3):
            request = chat(*content, vllm_xargs={CONFIG_KEY: value})
            with pytest.raises(ConfigurationError, match=r"vllm_xargs.*'minipic'"):
                await ids_of(renderer, request)
            assert request.vllm_xargs == {CONFIG_KEY: value}
        assert await ids_of(renderer, chat(*content, vllm_xargs={"other": 1}))
    assert await ids_of(renderer, chat(QUESTION, vllm_xargs={CONFIG_KEY: '{"frame": "none"}'}))


async def test_tokenize_shows_the_layout(renderer: Any, marker_text: str) -> None:
    """Its requests know neither `vllm_xargs` nor `kv_transfer_params`."""
    for content in ([SPAN, QUESTION], [{"type": "text", "text": marker_text}], [QUESTION]):
        want = await ids_of(renderer, chat(*content))
        assert await ids_of(renderer, chat(*content, kind=TokenizeChatRequest)) == want
    plain = await ids_of(renderer, chat({"type": "text", "text": marker_text}))
    assert num_markers(renderer, plain) == 0


async def test_span_options_of_an_unmarked_chat_are_checked(renderer: Any) -> None:
    """Here, so that no stream begins which then has to break off."""
    request = chat(QUESTION, vllm_xargs={CONFIG_KEY: '{"frame": "both"}'}, stream=True)
    with pytest.raises(ConfigurationError, match="none, prefix"):
        await ids_of(renderer, request)


# ---- values of all kinds ----------------------------------------------------------------------

_DEEP: list[Any] = []
for _ in range(5000):
    _DEEP = [_DEEP]
VALUES = {
    "number": 3, "float": 1.5, "list": ["a"], "object": {"a": 1}, "lone surrogate": "\ud800",
    "odd key": {"\ud800": 1}, "long": "x" * 100_000, "wide": [3] * 100_000, "deep": _DEEP,
}  # fmt: skip


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
async def test_a_refusal_can_be_sent_whatever_it_speaks_of(renderer: Any, value: Any) -> None:
    """Ours, short, and without what JSON cannot carry: else the server fails while it answers."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * 5000}}
    requests = [
        chat({**SPAN, "minipic": value}, QUESTION),
        chat({**SPAN, "minipic": {"span": True, "id": [value]}}, QUESTION),
        chat({**SPAN, "type": [value]}, QUESTION),
        chat(SPAN, QUESTION, minipic=value),
        chat(SPAN, QUESTION, minipic={"primer": [3, value]}),
        chat(SPAN, QUESTION, minipic={"primer": 3}),
        chat(SPAN, QUESTION, minipic={"late": value if value != 3 else -3}),
        chat(SPAN, QUESTION, minipic={"frame": value, "offsets": value}),
        chat(SPAN, QUESTION, minipic={"technique": value}),
        ChatCompletionRequest(
            model="m",
            messages=[
                {"role": "assistant", "tool_calls": [call]},
                {"role": "user", "content": [SPAN, QUESTION]},
            ],
        ),
    ]
    for request in requests:
        with pytest.raises((PromptError, ConfigurationError)) as caught:
            await ids_of(renderer, request)
        assert len(str(caught.value).encode()) < 1000


REQUESTS: dict[Any, dict[str, Any]] = {
    ChatCompletionRequest: {"messages": [{"role": "user", "content": [QUESTION]}]},
    CompletionRequest: {"prompt": [10, 11]},
    ResponsesRequest: {"input": "x"},
    GenerateRequest: {"token_ids": [10, 11], "sampling_params": {}},
}
# Each with options that take it, on routes that have them.
UNSENDABLE: dict[str, tuple[Any, set[str]]] = {
    "number": (2**64, {"top_k"}),
    "negative number": (-(2**63) - 1, {"top_k"}),
    "list": ([2**64], {"stop_token_ids"}),
    "object": ({"a": [{"b": 2**70}]}, {"kv_transfer_params", "chat_template_kwargs"}),
    "schema": ({"json": {"const": 2**64}}, {"structured_outputs"}),
    "lone surrogate": ("\ud800", {"session_id", "request_id"}),
    "object of texts": ({"a": "\ud800"}, {"kv_transfer_params", "chat_template_kwargs"}),
    "deep": ({"a": _DEEP}, {"kv_transfer_params", "chat_template_kwargs"}),
}


def is_sendable(value: Any, depth: int = 0) -> bool:
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    if isinstance(value, str):
        return value.isprintable()
    if isinstance(value, BaseModel) or is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        value = [*value, *value.values()]
    inside = value if isinstance(value, list) else ()
    return depth < 200 and all(is_sendable(one, depth + 1) for one in inside)


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize(("value", "surely"), UNSENDABLE.values(), ids=UNSENDABLE)
async def test_options_that_cannot_be_sent_are_refused_before_a_stream_begins(
    renderer: Any, kind: Any, value: Any, surely: set[str]
) -> None:
    """vLLM fails at them behind the status of a stream, or breaks it off. With a parser of
    reasoning it sends variables of a chat template too."""
    refused = set()
    for name in set(kind.model_fields) - {"model", "tools", *REQUESTS[kind]}:
        try:
            request = kind(**{"model": "m", **REQUESTS[kind], name: value})
        except Exception:  # refused by vLLM itself, in one way or other
            continue
        if is_sendable(getattr(request, name)):  # read as something else
            continue
        with pytest.raises(PromptError, match=f"The request's {name} ") as caught:
            await (
                renderer.preprocess_chat(request, [], None, "auto", {})
                if kind in (ChatCompletionRequest, ResponsesRequest)
                else renderer.preprocess_completion(request, [10, 11], None)
            )
        assert len(str(caught.value)) < 200
        refused.add(name)
    assert surely & set(kind.model_fields) <= refused


async def test_a_chat_that_is_nested_too_deeply(renderer: Any) -> None:
    with pytest.raises(PromptError, match="deeply"):
        await ids_of(renderer, chat(SPAN, QUESTION, chat_template_kwargs={"x": _DEEP}))


# ---- one reading of a request ---------------------------------------------------------------


def prompts(config: SpanConfig) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Token ids and options."""
    text = [10] * BLOCK
    span = [config.ssep, *[11] * (BLOCK - 1)]
    end = [config.pdep, 12]
    good = [*text, *span, *end]
    patch = {"at": 2 * BLOCK, "first": 3, "end": 40}
    return {
        "ordinary": ([10, 11, 12], {}),
        "spans": (good, {}),
        "spans, options": (good, {"frame": "none", "offsets": "padded"}),
        "a lone span": (span, {"frame": "none"}),
        "marker inside a block": ([*text, 10, config.ssep, 11], {}),
        "pad in the middle": ([*text, *span[:5], config.pad, *span[6:], *end], {}),
        "pads at the end": ([*good, config.pad], {}),
        "a block of pads": ([*text, *span, *[config.pad] * BLOCK, *end], {}),
        "ends in a span": ([*text, *span, *span], {}),
        "unknown option": (good, {"speed": 1}),
        "unknown value": ([10], {"frame": "both"}),
        "patch of nothing": (good, {"patches": [patch]}),
        "place of nothing": (good, {"places": [{"at": 3, "offset": 1}]}),
        "patches that are none": (good, {"patches": 3}),
        "past the context": (good, {"places": [(2 * BLOCK, 2048)]}),
        "past all numbers": (good, {"places": [(2 * BLOCK, 2**70)]}),
    }


async def refusal(door: Any) -> MiniPICError | None:
    """What a door says; vLLM's own error may be around ours."""
    try:
        found = door()
        if hasattr(found, "__await__"):
            await found
    except Exception as error:
        ours = error if isinstance(error, MiniPICError) else error.__cause__
        assert isinstance(ours, MiniPICError)
        return ours
    return None


GOOD = {"ordinary", "spans", "spans, options", "a lone span"}
NAMES = list(prompts(SpanConfig(3, 4, 5, BLOCK)))


@pytest.mark.parametrize("name", NAMES)
async def test_all_doors_refuse_the_same(renderer: Any, name: str) -> None:
    """The server before it streams, vLLM's input processor of any engine, and the block hasher."""
    config = renderer.span_config
    ids, options = prompts(config)[name]
    params = SimpleNamespace(extra_args={CONFIG_KEY: options})
    request = SimpleNamespace(
        prompt_token_ids=ids,
        sampling_params=params,
        mm_features=None,
        prompt_embeds=None,
        resumable=False,
        request_id="r",
        cache_salt=None,
        priority=0,
    )
    vllm_config = SimpleNamespace(
        additional_config={CONFIG_KEY: config.to_dict()},
        model_config=SimpleNamespace(max_model_len=2048),
    )
    asked = CompletionRequest(
        model="m", prompt=ids, max_tokens=1, vllm_xargs={CONFIG_KEY: json.dumps(options)}
    )
    found = [
        await refusal(door)
        for door in (
            lambda: renderer.preprocess_completion(asked, ids, None),
            lambda: check_request(vllm_config, request),
            lambda: request_segments(request, config, max_model_len=2048),
        )
    ]
    assert len({(type(error), str(error)) for error in found}) == 1
    assert (found[0] is None) == (name in GOOD)
    assert isinstance(found[0], PromptError | ConfigurationError | None)


@pytest.mark.parametrize(
    ("options", "further", "words"),
    [
        ({"stop": ["\ud800"]}, {}, "Unicode"),
        ({"bad_words": ["\ud800"]}, {}, "Unicode"),
        ({"extra_args": {"x": ["\ud800"]}}, {}, "Unicode"),
        ({}, {"request_id": "\ud800"}, "Unicode"),
        ({}, {"cache_salt": "\ud800"}, "Unicode"),
        ({"extra_args": {"x": 10**30}}, {}, "too large"),
        ({"extra_args": {"x": [1, {"y": -(10**30)}]}}, {}, "too large"),
        ({"seed": 2**64}, {}, "too large"),
        ({"stop_token_ids": [10**30]}, {}, "too large"),
        ({}, {"priority": 2**64}, "too large"),
        ({"extra_args": {"x": _DEEP}}, {}, "too deeply"),
    ],
)
def test_values_that_no_process_can_be_sent(
    options: dict[str, Any], further: dict[str, Any], words: str
) -> None:
    """They come through JSON; vLLM would fail at sending them on. Some it refuses by itself when
    options are made, but not when they are changed."""
    given = {"prompt_token_ids": [10], "mm_features": None, "prompt_embeds": None}
    given |= {"resumable": False, "request_id": "r", "cache_salt": None, "priority": 0}
    config = SpanConfig(3, 4, 5, BLOCK)
    vllm_config: Any = SimpleNamespace(
        additional_config={CONFIG_KEY: config.to_dict()},
        model_config=SimpleNamespace(max_model_len=2048),
    )
    options_of_good = SamplingParams(stop=["\u00e9"], extra_args={"x": [2**64 - 1, [-(2**63)]]})
    good = SimpleNamespace(**given, sampling_params=options_of_good)
    check_request(vllm_config, good)
    params = SamplingParams()
    for name, value in options.items():
        setattr(params, name, value)
    bad = SimpleNamespace(**{**given, **further}, sampling_params=params)
    with pytest.raises(RequestRefused, match=words) as caught:
        check_request(vllm_config, bad)
    assert isinstance(caught.value.__cause__, PromptError)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("options", "further", "words"),
    [
        ({"prompt_logprobs": 1.5}, {}, "prompt_logprobs"),
        ({"max_tokens": 2.5}, {}, "max_tokens"),
        ({"stop_token_ids": ["x"]}, {}, "stop_token_ids"),
        ({"logit_bias": {"x": 1.0}}, {}, "logit_bias"),
        ({"bad_words": [3]}, {}, "bad_words"),
        ({"structured_outputs": "x"}, {}, "structured_outputs"),
        ({"extra_args": ["x"]}, {}, "extra_args"),
        ({}, {"request_id": 3}, "request_id"),
        ({}, {"cache_salt": 3}, "cache_salt"),
        ({}, {"priority": "high"}, "priority"),
    ],
)
def test_values_that_no_process_could_read(
    options: dict[str, Any], further: dict[str, Any], words: str
) -> None:
    """vLLM would send them on, and its engine end at reading them."""
    given = {"prompt_token_ids": [10], "mm_features": None, "prompt_embeds": None}
    given |= {"resumable": False, "request_id": "r", "cache_salt": "s", "priority": -3}
    vllm_config: Any = SimpleNamespace(
        additional_config={CONFIG_KEY: SpanConfig(3, 4, 5, BLOCK).to_dict()},
        model_config=SimpleNamespace(max_model_len=2048),
    )
    good = SamplingParams(
        temperature=1, seed=3, stop=["x"], logit_bias={3: 1}, bad_words=["x"], extra_args={"x": 1},
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
    )  # fmt: skip
    good = as_received(good)
    assert good == as_received(good)
    assert good.structured_outputs.json == {"type": "object"}
    check_request(vllm_config, SimpleNamespace(**given, sampling_params=good))
    params = SamplingParams()
    for name, value in options.items():
        setattr(params, name, value)
    bad = SimpleNamespace(**{**given, **further}, sampling_params=params)
    with pytest.raises(RequestRefused, match=f"wrong value.*{words}"):
        check_request(vllm_config, bad)


@pytest.mark.parametrize("adapters", [True, False])
def test_prompt_logprobs_beside_adapters_on_a_cpu(
    adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would end the engine."""
    vllm_config: Any = SimpleNamespace(
        additional_config={CONFIG_KEY: SpanConfig(3, 4, 5, BLOCK).to_dict()},
        model_config=SimpleNamespace(max_model_len=2048),
        lora_config=object() if adapters else None,
    )

    def ask(**options: Any) -> None:
        request = SimpleNamespace(
            prompt_token_ids=[10], mm_features=None, prompt_embeds=None, resumable=False,
            request_id="r", cache_salt=None, priority=0, sampling_params=SamplingParams(**options),
        )  # fmt: skip
        check_request(vllm_config, request)

    ask(logprobs=1)
    for on_cpu in (True, False):
        monkeypatch.setattr(type(current_platform), "is_cpu", lambda self, on_cpu=on_cpu: on_cpu)
        if on_cpu and adapters:
            with pytest.raises(RequestRefused, match="prompt_logprobs"):
                ask(prompt_logprobs=0)
        else:
            ask(prompt_logprobs=0)


def test_values_as_they_are_received() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), seed=np.int64(3), allowed_token_ids={4}, stop_token_ids=[5]
    )
    received = as_received(params)
    assert (received.temperature, received.seed) == (0.5, 3)
    assert type(received.seed) is int
    assert received.allowed_token_ids == [4]
    assert received.all_stop_token_ids == {5}


@pytest.mark.parametrize("spans", [True, False])
def test_options_that_vllm_cannot_copy(monkeypatch: pytest.MonkeyPatch, spans: bool) -> None:
    """They are nested less deeply than what cannot be sent."""
    config = SpanConfig(3, 4, 5, BLOCK)
    additional = {CONFIG_KEY: config.to_dict()} if spans else {}

    def process_inputs(self: Any, params: SamplingParams) -> Any:
        return params.clone()

    monkeypatch.setattr(InputProcessor, "process_inputs", process_inputs)
    seams.on_process_inputs(lambda config, request: None, refuse_depth)
    processor: Any = SimpleNamespace(vllm_config=SimpleNamespace(additional_config=additional))
    value = _DEEP
    for _ in range(4500):
        (value,) = value
    good, bad = (SamplingParams(extra_args={"x": value}) for value in ([[1]], value))
    assert InputProcessor.process_inputs(processor, good) == good
    with pytest.raises(RequestRefused if spans else RecursionError):
        InputProcessor.process_inputs(processor, bad)


async def test_images_and_embeddings_at_every_door(renderer: Any) -> None:
    config = renderer.span_config
    ids, _ = prompts(config)["spans"]
    vllm_config = SimpleNamespace(
        additional_config={CONFIG_KEY: config.to_dict()},
        model_config=SimpleNamespace(max_model_len=2048),
    )
    for kind, further in (
        ("multimodal", {"mm_features": ["an image"], "prompt_embeds": None}),
        ("embeds", {"mm_features": None, "prompt_embeds": "a tensor"}),
    ):
        request = SimpleNamespace(
            prompt_token_ids=ids,
            sampling_params=SimpleNamespace(extra_args=None),
            request_id="r",
            priority=0,
            **further,
        )
        for door in (
            lambda kind=kind: renderer.minipic.check(
                {"type": kind, "prompt_token_ids": ids}, SimpleNamespace()
            ),
            lambda request=request: check_request(vllm_config, request),
            lambda request=request: request_segments(request, config),
        ):
            assert "images or prompt embeddings" in str(await refusal(door))
