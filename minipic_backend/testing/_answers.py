"""What a fake engine answers, cut as the sampling options say."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from minipic_backend.prompt import Prompt
from minipic_backend.results import Chunk, Completion, Result
from minipic_backend.testing._layout import split_tokens, token_id

__all__ = ["Answers", "Script", "chunks_of"]

Answers = str | Sequence[str] | Callable[[Prompt], str]


class Script:
    """One string, a sequence taken in turn and over again, or a function of the prompt."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers if callable(answers) or isinstance(answers, str) else list(answers)
        self._turn = itertools.count()

    def complete(
        self, prompt: Prompt, limit: int, sampling: Mapping[str, Any]
    ) -> tuple[Completion, ...]:
        """`n` completions of at most `limit` tokens."""
        return tuple(
            _cut(index, self._next(prompt), limit, sampling)
            for index in range(sampling.get("n") or 1)
        )

    def _next(self, prompt: Prompt) -> str:
        if isinstance(self._answers, str):
            return self._answers
        if callable(self._answers):
            return self._answers(prompt)
        return self._answers[next(self._turn) % len(self._answers)]


def _cut(index: int, text: str, limit: int, sampling: Mapping[str, Any]) -> Completion:
    tokens = split_tokens(text)
    reason, stop_reason = "stop" if len(tokens) <= limit else "length", None
    kept = "".join(tokens[:limit])
    stops = sampling.get("stop") or []
    places = [(kept.find(stop), stop) for stop in ([stops] if isinstance(stops, str) else stops)]
    if found := sorted(pair for pair in places if pair[0] >= 0):
        place, stop_reason = found[0]
        reason = "stop"
        kept = kept[: place + len(stop_reason) * bool(sampling.get("include_stop_str_in_output"))]
    ids = tuple(token_id(token) for token in split_tokens(kept))
    wanted = sampling.get("logprobs") is not None
    logprobs = tuple({token: 0.0} for token in ids) if wanted else None
    return Completion(index, kept, ids, reason, stop_reason, logprobs)


def chunks_of(result: Result) -> list[Chunk]:
    """One piece per token; the last of each completion says why it ended."""
    chunks: list[Chunk] = []
    for completion in result.completions:
        for place, token in enumerate(split_tokens(completion.text) or [""]):
            here = slice(place, place + 1)
            chunks.append(
                Chunk(
                    result.request_id,
                    token,
                    completion.token_ids[here],
                    completion.index,
                    logprobs=completion.logprobs[here] if completion.logprobs else None,
                )
            )
        chunks[-1] = replace(
            chunks[-1],
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
    chunks[-1] = replace(chunks[-1], usage=result.usage, timing=result.timing)
    return chunks
