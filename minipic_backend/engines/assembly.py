"""Puts the pieces of a request together: chunks as they come, the result at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from minipic_backend.engines.driver import Delta
from minipic_backend.results import Chunk, Completion, Result, Timing, Usage

__all__ = ["Assembly"]


@dataclass
class _Answer:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Assembly:
    """Collects one request's deltas.

    Args:
        request_id: its id.
        num_prompt_tokens: tokens of the prompt, markers and pads included.
        num_pads: pads among them.
        started_at: `time.perf_counter()` when the caller asked.
    """

    def __init__(
        self, request_id: str, *, num_prompt_tokens: int, num_pads: int, started_at: float
    ) -> None:
        self._request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._num_pads = num_pads
        self._started_at = started_at
        self._first_at: float | None = None
        self._answers: dict[int, _Answer] = {}
        self._usage: Usage | None = None
        self._timing: Timing | None = None

    def add(self, delta: Delta) -> Iterator[Chunk]:
        """Takes a delta in at once; the chunks that it amounts to may be read or left."""
        if self._first_at is None:
            self._first_at = delta.at
        pieces = [self._take(output) for output in delta.outputs]
        if delta.finished:
            self._close(delta)
            # Usage stands on the last chunk of the stream, whichever completion that is.
            last = pieces.pop() if pieces else {"text": "", "token_ids": ()}
            pieces.append({**last, "usage": self._usage, "timing": self._timing})
        return iter([Chunk(self._request_id, **piece) for piece in pieces])

    def result(self) -> Result:
        """The finished request."""
        assert self._usage is not None
        assert self._timing is not None
        completions = tuple(
            Completion(
                index,
                "".join(answer.text),
                tuple(answer.token_ids),
                answer.finish_reason,
                answer.stop_reason,
                tuple(answer.logprobs) if answer.logprobs else None,
            )
            for index, answer in sorted(self._answers.items())
        )
        return Result(self._request_id, completions, self._usage, self._timing)

    def _take(self, output: Any) -> dict[str, Any]:
        answer = self._answers.setdefault(output.index, _Answer())
        logprobs = tuple(
            {token: entry.logprob for token, entry in position.items()}
            for position in output.logprobs or ()
        )
        token_ids = tuple(output.token_ids)
        answer.text.append(output.text)
        answer.token_ids += token_ids
        answer.logprobs += logprobs
        if output.finish_reason is not None:
            answer.finish_reason = str(output.finish_reason)
            answer.stop_reason = output.stop_reason
        return {
            "text": output.text,
            "token_ids": token_ids,
            "index": output.index,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "logprobs": logprobs or None,
        }

    def _close(self, delta: Delta) -> None:
        assert self._first_at is not None
        created = delta.num_cache_creation_tokens
        spans = delta.spans
        self._usage = Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(len(answer.token_ids) for answer in self._answers.values()),
            cached_tokens=delta.num_cached_tokens,
            cache_creation_tokens=created,
            pad_tokens=self._num_pads,
            span_tokens_hit=spans.hit_tokens if spans else None,
            span_tokens_waited=spans.waited_tokens if spans else None,
            span_tokens_computed=spans.computed_tokens if spans else None,
        )
        self._timing = Timing(
            self._first_at - self._started_at,
            delta.at - self._started_at,
            spans.wait_s if spans else None,
        )
