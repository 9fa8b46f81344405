"""Refuses a request that spans forbid, in the process that takes it in.

In the engine's own it would be too late: there an error has no way back to the caller, who would
see a failure of the server.
"""

from __future__ import annotations

from functools import cache
from numbers import Integral, Real
from typing import Any, TypedDict, get_type_hints

import msgspec
from pydantic import BaseModel
from vllm.exceptions import VLLMValidationError

from minipic_backend.config import CONFIG_KEY, SpanConfig
from minipic_backend.errors import MiniPICError, PromptError, shown

__all__ = [
    "RequestRefused",
    "as_received",
    "check_request",
    "refuse_depth",
    "refuse_unsendable",
]

_OPTION = "An option of the request"
_TOO_DEEP = f"{_OPTION} is nested too deeply"

_SENT = (
    "request_id", "cache_salt", "priority", "sampling_params", "data_parallel_rank", "session_id",
    "trace_headers", "kv_hints",
)  # fmt: skip
"""Of vLLM's `EngineCoreRequest`: what a caller chooses, the prompt apart."""


class RequestRefused(VLLMValidationError, ValueError):
    """What we refuse, as vLLM's front end passes it on to the caller: any other error would reach
    an HTTP client as a failure of the server. The cause is ours."""


def check_request(vllm_config: Any, request: Any) -> None:
    """Checks vLLM's `EngineCoreRequest`; does nothing where spans are off.

    Raises:
        RequestRefused: markers or pads at the wrong place, unknown span options, positions past the
            context, values that cannot be sent to an engine, or spans together with
            something that they do not go with.
    """
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or CONFIG_KEY not in additional:
        return
    if request.sampling_params is None:
        return
    try:
        config = _config(vllm_config, additional[CONFIG_KEY])
        _check(request, config, vllm_config.model_config.max_model_len)
        _check_adapters(request, vllm_config)
    except MiniPICError as error:
        raise RequestRefused(str(error)) from error


def refuse_depth(vllm_config: Any, error: RecursionError) -> None:
    """Refuses a request whose options vLLM could not even copy; does nothing where spans are off.

    Raises:
        RequestRefused: it.
    """
    additional = vllm_config.additional_config
    if isinstance(additional, dict) and CONFIG_KEY in additional:
        raise RequestRefused(_TOO_DEEP) from PromptError(_TOO_DEEP)


_last: tuple[Any, SpanConfig] | None = None
"""An engine's options, as vLLM carries them, and what was read from them."""


def _config(vllm_config: Any, values: Any) -> SpanConfig:
    """`span_config`, read anew only where another engine's request came before."""
    global _last
    last = _last
    if last is None or last[0] is not values:
        from minipic_backend.plugin.enable import span_config

        last = _last = values, span_config(vllm_config)
    return last[1]


def _check(request: Any, config: SpanConfig, max_model_len: int) -> None:
    from minipic_backend.plugin.hasher import request_segments
    from minipic_backend.plugin.span_jobs import JOB_PREFIX

    _check_sendable(request)
    request_segments(request, config, max_model_len=max_model_len)
    if request.resumable:
        # vLLM counts what was generated as prompt when such a request goes on: a marker among it
        # would then be read as one.
        raise PromptError("An engine with spans takes no prompts that are streamed in")
    if request.request_id.startswith(JOB_PREFIX):
        raise PromptError(
            f"request_id={shown(request.request_id)}: {JOB_PREFIX!r} is the scheduler's"
        )


def _check_adapters(request: Any, vllm_config: Any) -> None:
    """On a CPU, vLLM's LoRA fails at logits of more tokens than one a request: the engine ends."""
    if getattr(request.sampling_params, "prompt_logprobs", None) is None:
        return
    from vllm.platforms import current_platform

    if vllm_config.lora_config is not None and current_platform.is_cpu():
        raise PromptError("On a CPU, prompt_logprobs does not go together with LoRA adapters")


def _check_sendable(request: Any) -> None:
    # Of wrong types, they would end the engine's process, or fail in the middle of a step here.
    _received({name: getattr(request, name, None) for name in _SENT})


def as_received(params: Any) -> Any:
    """vLLM's `SamplingParams` as the engine's process would read them: lists for tuples and sets,
    Python's numbers for numpy's.

    Raises:
        PromptError: a value of a wrong type, or one that cannot be sent.
    """
    return _received({"sampling_params": params})["sampling_params"]


def _received(given: dict[str, Any]) -> Any:
    """Fields of vLLM's `EngineCoreRequest`, sent and read again."""
    sent = refuse_unsendable(given, _OPTION)
    try:
        return _decoder().decode(sent)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        words = str(error).replace("$.sampling_params.", "").replace("$.", "")
        raise PromptError(f"{_OPTION} has a wrong value: {words}") from error


@cache
def _decoder() -> msgspec.msgpack.Decoder[Any]:
    from vllm.v1.engine import EngineCoreRequest

    types = get_type_hints(EngineCoreRequest)
    fields = {name: types[name] for name in _SENT}
    return msgspec.msgpack.Decoder(TypedDict("Sent", fields, total=False))  # type: ignore[operator]


def refuse_unsendable(value: Any, name: str) -> bytes:
    """Refuses what vLLM could not send to the engine's process, which it does as msgpack. An engine
    in this process could be given more, but takes the same.

    Args:
        value: anything that JSON can say, vLLM's own objects, pydantic's models.
        name: of the value, for the error.

    Returns:
        What would be sent.

    Raises:
        PromptError: an integer beyond 64 bits, text that is no valid Unicode, or deep nesting.
    """
    try:
        return msgspec.msgpack.encode(value, enc_hook=_as_sent)
    except UnicodeEncodeError as error:
        raise PromptError(f"{name} is no valid Unicode: {error}") from error
    except OverflowError as error:
        raise PromptError(f"{name} holds a number that is too large: {error}") from error
    except RecursionError as error:
        raise PromptError(f"{name} is nested too deeply") from error


def _as_sent(value: Any) -> Any:
    """What a pydantic model holds, numpy's numbers as Python's; nothing of other objects."""
    if isinstance(value, BaseModel):
        return dict(value)
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else None
