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

from langchain_minipic._tools import call_chunks, calls
from minipic_backend import Chunk, Completion, Result, Timing, Usage
from minipic_backend.tools import AnswerPlan, TextParser

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


def chat_result(result: Result, model: str, plan: AnswerPlan) -> ChatResult:
    """One generation per completion. Usage counts the request, so the first one alone has it."""
    generations = []
    for completion in result.completions:
        answer = plan.parser().parse(completion.text, completion.token_ids)
        tool_calls, invalid_tool_calls = calls(answer)
        message = AIMessage(
            content=answer.content,
            additional_kwargs=_reasoning(answer.reasoning),
            tool_calls=tool_calls,
            invalid_tool_calls=invalid_tool_calls,
            response_metadata=_metadata(result.request_id, model, result.timing),
            usage_metadata=usage_metadata(result.usage) if completion.index == 0 else None,
        )
        info = _generation_info(completion)
        generations.append(ChatGeneration(message=message, generation_info=info))
    return ChatResult(generations=generations, llm_output={"model_name": model})


def chat_chunk(chunk: Chunk, parser: TextParser, model: str) -> ChatGenerationChunk | None:
    """None where the parser holds everything back. Usage, timing and the model's name go out
    once, with the last piece: pieces get merged."""
    deltas = [parser.feed(chunk.text, chunk.token_ids)]
    if chunk.usage is not None:
        deltas.append(parser.finish())
    info = _generation_info(chunk)
    if not any(deltas) and info is None and chunk.usage is None:
        return None
    message = AIMessageChunk(
        content="".join(delta.content for delta in deltas),
        additional_kwargs=_reasoning("".join(delta.reasoning for delta in deltas)),
        tool_call_chunks=[piece for delta in deltas for piece in call_chunks(delta)],
    )
    if chunk.usage is not None:
        message.usage_metadata = usage_metadata(chunk.usage)
        message.response_metadata = _metadata(chunk.request_id, model, chunk.timing)
        message.chunk_position = "last"
    return ChatGenerationChunk(message=message, generation_info=info)


def _reasoning(text: str) -> dict[str, Any]:
    return {"reasoning_content": text} if text else {}


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
