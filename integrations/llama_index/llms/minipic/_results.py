"""What an engine gives back, as LlamaIndex's responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.llms.minipic._records import CallRecord
from llama_index.llms.minipic._requests import PlannedRequest

from minipic_backend import Chunk, Completion, Result, Timing, Usage
from minipic_backend.tools import Answer, AnswerDelta

__all__ = ["Streamed", "as_completion", "chat_response", "record_of", "usage_dict"]


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


def chat_response(result: Result, request: PlannedRequest, model: str) -> ChatResponse:
    """A whole answer. `raw` has the usage, and all answers where `n` asked for several."""
    answer = request.plan.parser().parse(result.text, result.token_ids)
    raw = _raw(request, model, result.request_id, result.usage, result.timing, result.completions)
    return ChatResponse(
        message=_message(answer), raw=raw, additional_kwargs=_token_counts(result.usage)
    )


def as_completion(response: ChatResponse) -> CompletionResponse:
    """A chat's response as that of a completion."""
    return CompletionResponse(
        text=response.message.content or "",
        delta=response.delta,
        raw=response.raw,
        additional_kwargs=response.additional_kwargs,
    )


def record_of(request: PlannedRequest, part: Result | Chunk) -> CallRecord | None:
    """The record of a finished request, from its result or its last chunk; None before that."""
    if part.usage is None:
        return None
    return CallRecord(
        request.kind,
        part.request_id,
        part.usage,
        part.timing,
        part.finish_reason,
        request.dropped_messages,
    )


class Streamed:
    """An answer as it grows: each response holds all of it so far, and new text as `delta`.
    Usage and timing are in `raw` of the last."""

    def __init__(self, request: PlannedRequest, model: str) -> None:
        self._request = request
        self._model = model
        self._parser = request.plan.parser()
        self._content = self._reasoning = ""
        self._calls: list[AnswerDelta] = []
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, float]] = []

    def add(self, chunk: Chunk) -> ChatResponse | None:
        """None where the chunk brings nothing to be seen."""
        self._text += chunk.text
        self._token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs or ()
        new = [self._parser.feed(chunk.text, chunk.token_ids)]
        raw: dict[str, Any] = {"request_id": chunk.request_id, "model": self._model}
        further: dict[str, Any] = {}
        if chunk.usage is not None:
            new.append(self._parser.finish())
            raw = self._raw(chunk, chunk.usage)
            further = _token_counts(chunk.usage)
        elif not any(new):
            return None
        if thought := "".join(delta.reasoning for delta in new):
            further["thinking_delta"] = thought
        self._content += "".join(delta.content for delta in new)
        self._reasoning += "".join(delta.reasoning for delta in new)
        self._calls += [delta for delta in new if delta.tool_calls]
        calls = Answer.join(self._calls).tool_calls if self._calls else ()
        return ChatResponse(
            message=_message(Answer(self._content, self._reasoning, calls)),
            delta="".join(delta.content for delta in new),
            raw=raw,
            additional_kwargs=further,
        )

    def _raw(self, chunk: Chunk, usage: Usage) -> dict[str, Any]:
        whole = Completion(
            chunk.index,
            self._text,
            tuple(self._token_ids),
            chunk.finish_reason,
            chunk.stop_reason,
            tuple(self._logprobs) or None,
        )
        return _raw(self._request, self._model, chunk.request_id, usage, chunk.timing, [whole])


def _message(answer: Answer) -> ChatMessage:
    blocks: list[ContentBlock] = []
    if answer.reasoning:
        blocks.append(ThinkingBlock(content=answer.reasoning))
    if answer.content or not answer.tool_calls:
        blocks.append(TextBlock(text=answer.content))
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in answer.tool_calls
    ]
    blocks += [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=call.arguments)
        for call in answer.tool_calls
    ]
    return ChatMessage(
        role=MessageRole.ASSISTANT,
        blocks=blocks,
        additional_kwargs={"tool_calls": calls} if calls else {},
    )


def _token_counts(usage: Usage) -> dict[str, Any]:
    counts = usage_dict(usage)
    return {name: counts[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def _raw(
    request: PlannedRequest,
    model: str,
    request_id: str,
    usage: Usage,
    timing: Timing | None,
    completions: Sequence[Completion],
) -> dict[str, Any]:
    """Times are in seconds, on the caller's clock."""
    return {
        "request_id": request_id,
        "model": model,
        "usage": usage_dict(usage),
        "timing": {"ttft_s": timing.ttft_s, "total_s": timing.total_s} if timing else {},
        "dropped_messages": request.dropped_messages,
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
