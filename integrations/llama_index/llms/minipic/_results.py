"""What an engine gives back, as LlamaIndex's responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
)

from llama_index.llms.minipic._records import CallRecord
from minipic_backend import Chunk, Completion, Result, Timing, Usage

__all__ = ["Streamed", "chat_response", "completion_response", "usage_dict"]


def usage_dict(usage: Usage) -> dict[str, Any]:
    """Tokens of a request, under the names of OpenAI's API. `prompt_tokens` includes those read
    from the cache and those put there."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "cache_creation_tokens": usage.cache_creation_tokens,
        "pad_tokens": usage.pad_tokens,
    }


def chat_response(result: Result, model: str) -> ChatResponse:
    """A whole answer. `raw` has the usage, and all answers where `n` asked for several."""
    response = completion_response(result, model)
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, content=response.text),
        raw=response.raw,
        additional_kwargs=response.additional_kwargs,
    )


def completion_response(result: Result, model: str) -> CompletionResponse:
    """`chat_response`, for a completion."""
    raw = _raw(result.request_id, model, result.usage, result.timing, result.completions)
    return CompletionResponse(
        text=result.text, raw=raw, additional_kwargs=_token_counts(result.usage)
    )


class Streamed:
    """An answer as it grows: each response holds all the text so far, and what is new as `delta`.
    Usage and timing are in `raw` of the last."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._text = ""
        self._logprobs: list[Any] = []
        self._token_ids: list[int] = []

    def completion(self, chunk: Chunk) -> CompletionResponse:
        self._text += chunk.text
        self._token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs or ()
        raw: dict[str, Any] = {"request_id": chunk.request_id, "model": self._model}
        counts: dict[str, Any] = {}
        if chunk.usage is not None:
            whole = Completion(
                chunk.index,
                self._text,
                tuple(self._token_ids),
                chunk.finish_reason,
                chunk.stop_reason,
                tuple(self._logprobs) or None,
            )
            raw = _raw(chunk.request_id, self._model, chunk.usage, chunk.timing, [whole])
            counts = _token_counts(chunk.usage)
        return CompletionResponse(
            text=self._text, delta=chunk.text, raw=raw, additional_kwargs=counts
        )

    def chat(self, chunk: Chunk) -> ChatResponse:
        response = self.completion(chunk)
        return ChatResponse(
            message=ChatMessage(role=MessageRole.ASSISTANT, content=response.text),
            delta=response.delta,
            raw=response.raw,
            additional_kwargs=response.additional_kwargs,
        )


def record_of(kind: str, part: Result | Chunk, dropped: int) -> CallRecord:
    """The record of a finished request, from its result or its last chunk."""
    assert part.usage is not None
    return CallRecord(kind, part.request_id, part.usage, part.timing, part.finish_reason, dropped)


def _token_counts(usage: Usage) -> dict[str, Any]:
    counts = usage_dict(usage)
    return {name: counts[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def _raw(
    request_id: str,
    model: str,
    usage: Usage,
    timing: Timing | None,
    completions: Sequence[Completion],
) -> dict[str, Any]:
    times = {"ttft_s": timing.ttft_s, "total_s": timing.total_s} if timing else {}
    return {
        "request_id": request_id,
        "model": model,
        "usage": usage_dict(usage),
        "timing": times,
        "choices": [
            {
                "index": completion.index,
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                **({} if completion.logprobs is None else {"logprobs": _logprobs(completion)}),
            }
            for completion in completions
        ],
    }


def _logprobs(completion: Completion) -> list[dict[str, Any]]:
    return [
        {"token_id": token, "logprob": row.get(token), "top": dict(row)}
        for token, row in zip(completion.token_ids, completion.logprobs or (), strict=True)
    ]
