"""Server-sent events of `/v1/completions`, as deltas of a request."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from minipic_backend.engines.driver import Delta
from minipic_backend.remote.failures import refusal

__all__ = ["Output", "deltas"]


@dataclass(frozen=True, slots=True)
class _Logprob:
    logprob: float


@dataclass(frozen=True, slots=True)
class Output:
    """A choice's news, in the form of vLLM's `CompletionOutput`."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: tuple[Mapping[int, _Logprob], ...] | None


async def deltas(
    body: AsyncIterator[bytes], base_url: str, *, num_prompt_tokens: int, block_size: int | None
) -> AsyncGenerator[Delta, None]:
    """One delta per event that has news; the last one, with the usage, is `finished`. Reads on to
    the body's end behind that, for as long as it is asked for more.

    Args:
        body: the response, in pieces of any size.
        base_url: for messages.
        num_prompt_tokens: of the request.
        block_size: `/v1/completions` does not say how many tokens were left in the cache; they are
            those of whole blocks that were not there. None: nobody knows.

    Raises:
        MiniPICError: an error that the server sent in the stream.
        httpx.RemoteProtocolError: a stream without an end.
    """
    held: Delta | None = None
    usage: Mapping[str, Any] | None = None
    is_done = False
    async for line in _lines(body):
        # Blank lines, and comments that keep proxies awake, are nothing.
        if is_done or not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            is_done = True
            yield _last(held, usage, num_prompt_tokens, block_size)
            continue
        event = json.loads(data)
        if "error" in event:
            error = event["error"]
            raise refusal(int(error.get("code") or 500), error, base_url)
        usage = event.get("usage") or usage
        if not event["choices"]:
            continue
        if held is not None:
            yield held
            held = None
        delta = Delta(_outputs(event["choices"]), False, None, None, time.perf_counter())
        if any(output.finish_reason for output in delta.outputs):
            held = delta  # what comes next may be the usage, which belongs to the last piece
        else:
            yield delta
    if not is_done:
        raise httpx.RemoteProtocolError("the stream ended without an end")


def _last(
    held: Delta | None,
    usage: Mapping[str, Any] | None,
    num_prompt_tokens: int,
    block_size: int | None,
) -> Delta:
    cached = _cached_tokens(usage)
    created = None
    if cached is not None and block_size is not None:
        created = max(0, num_prompt_tokens // block_size * block_size - cached)
    outputs = held.outputs if held is not None else ()
    return Delta(outputs, True, cached, created, time.perf_counter())


async def _lines(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines as events have them. An answer's text may hold U+2028 and its like, unescaped, which
    end a line for `str.splitlines`, and so for httpx."""
    rest = b""
    async for piece in body:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    yield rest


def _outputs(choices: Iterable[Mapping[str, Any]]) -> tuple[Output, ...]:
    return tuple(
        Output(
            int(choice["index"]),
            choice["text"],
            tuple(choice.get("token_ids") or ()),
            choice.get("finish_reason"),
            choice.get("stop_reason"),
            _logprobs(choice.get("logprobs")),
        )
        for choice in choices
    )


def _logprobs(found: Mapping[str, Any] | None) -> tuple[Mapping[int, _Logprob], ...] | None:
    if found is None:
        return None
    return tuple(
        {_token_id(name): _Logprob(value) for name, value in (position or {}).items()}
        for position in found["top_logprobs"]
    )


def _token_id(name: str) -> int:
    """`return_tokens_as_token_ids` writes token 260 as "token_id:260"."""
    return int(name.removeprefix("token_id:"))


def _cached_tokens(usage: Mapping[str, Any] | None) -> int | None:
    details = (usage or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return None if cached is None else int(cached)
