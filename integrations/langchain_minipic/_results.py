"""What an engine gives back, in LangChain's terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import (
    ChatGeneration,
    ChatGenerationChunk,
    ChatResult,
    Generation,
    GenerationChunk,
    LLMResult,
)

from minipic_backend import Chunk, Completion, Result, Timing, Usage

__all__ = ["chat_chunk", "chat_result", "llm_result", "text_chunk", "usage_metadata"]


def usage_metadata(usage: Usage) -> UsageMetadata:
    """Tokens of the whole request; `input_tokens` includes those read from the cache and those
    put there."""
    details = InputTokenDetails()
    if usage.cached_tokens is not None:
        details["cache_read"] = usage.cached_tokens
    if usage.cache_creation_tokens is not None:
        details["cache_creation"] = usage.cache_creation_tokens
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=details,
    )


def chat_result(result: Result, model: str) -> ChatResult:
    """One generation per completion. Usage counts the request, so the first one alone has it."""
    generations = []
    for completion in result.completions:
        message = AIMessage(
            content=completion.text,
            response_metadata=_metadata(result.request_id, model, result.timing),
            usage_metadata=usage_metadata(result.usage) if completion.index == 0 else None,
        )
        info = _generation_info(completion)
        generations.append(ChatGeneration(message=message, generation_info=info))
    return ChatResult(generations=generations, llm_output={"model_name": model})


def chat_chunk(chunk: Chunk, model: str) -> ChatGenerationChunk:
    """Usage, timing and the model's name go out once, with the last piece: pieces get merged."""
    message = AIMessageChunk(content=chunk.text)
    if chunk.usage is not None:
        message.usage_metadata = usage_metadata(chunk.usage)
        message.response_metadata = _metadata(chunk.request_id, model, chunk.timing)
        message.chunk_position = "last"
    return ChatGenerationChunk(message=message, generation_info=_generation_info(chunk))


def llm_result(results: Sequence[Result], model: str) -> LLMResult:
    """A list of generations per prompt."""
    generations = []
    for result in results:
        shared = _metadata(result.request_id, model, result.timing)
        usage = {"usage_metadata": usage_metadata(result.usage)}
        generations.append(
            [
                Generation(
                    text=completion.text,
                    generation_info={
                        **shared,
                        **(_generation_info(completion) or {}),
                        **(usage if completion.index == 0 else {}),
                    },
                )
                for completion in result.completions
            ]
        )
    prompt_tokens = sum(result.usage.prompt_tokens for result in results)
    completion_tokens = sum(result.usage.completion_tokens for result in results)
    token_usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return LLMResult(
        generations=generations, llm_output={"token_usage": token_usage, "model_name": model}
    )


def text_chunk(chunk: Chunk, model: str) -> GenerationChunk:
    """As `chat_chunk`, for a text model."""
    info = _generation_info(chunk) or {}
    if chunk.usage is not None:
        info |= _metadata(chunk.request_id, model, chunk.timing)
        info["usage_metadata"] = usage_metadata(chunk.usage)
    return GenerationChunk(text=chunk.text, generation_info=info or None)


def _metadata(request_id: str, model: str, timing: Timing | None) -> dict[str, Any]:
    """Times are in seconds, on the caller's clock."""
    times = {"ttft_s": timing.ttft_s, "total_s": timing.total_s} if timing else {}
    return {
        "model_name": model,
        "model_provider": "minipic",
        "request_id": request_id,
        **times,
    }


def _generation_info(part: Completion | Chunk) -> dict[str, Any] | None:
    info: dict[str, Any] = {}
    if part.finish_reason is not None:
        info["finish_reason"] = part.finish_reason
    if part.stop_reason is not None:
        info["stop_reason"] = part.stop_reason
    if part.logprobs is not None:
        info["logprobs"] = [
            {
                "token_id": token,
                "logprob": row.get(token),
                "top": [{"token_id": other, "logprob": value} for other, value in row.items()],
            }
            for token, row in zip(part.token_ids, part.logprobs, strict=True)
        ]
    return info or None
