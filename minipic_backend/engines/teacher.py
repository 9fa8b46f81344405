"""Teacher forcing: what a technique would say next at every token of an answer that is given.

No request reads out a given answer token by token. Instead the engine generates greedily from the
start; as long as it says what the answer says, its distributions are those wanted, the one at the
first difference included. There it is started again behind the answer's own token. The tokens in
front are in the cache, so each difference costs one short request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from minipic_backend.errors import EngineError, shown
from minipic_backend.results import Result

__all__ = ["TokenLogprobs", "follow"]

TokenLogprobs = Mapping[int, float]
"""Log-probabilities of the most likely next tokens, by token id."""

Continue = Callable[[Sequence[tuple[int, Sequence[int]]]], Sequence[Result]]
"""Runs requests, each given by the number of its prompt and the tokens that its answer begins
with, greedily and with log-probabilities, as far as the answer goes."""


def follow(
    answers: Sequence[Sequence[int]],
    generate: Continue,
    *,
    begun: Sequence[Result] | None = None,
) -> list[tuple[TokenLogprobs, ...]]:
    """Next-token distributions at every position of each answer, given the tokens before it.

    Args:
        answers: token ids, one sequence for each prompt.
        generate: runs requests.
        begun: greedy results of the prompts themselves, with log-probabilities, where they have
            been run already.

    Returns:
        One tuple for each answer, one entry for each of its tokens.
    """
    found: list[list[TokenLogprobs]] = [[] for _ in answers]
    waiting = [number for number, answer in enumerate(answers) if answer]
    if begun is not None:
        waiting = _take(waiting, [begun[number] for number in waiting], answers, found)
    while waiting:
        asked = [(number, answers[number][: len(found[number])]) for number in waiting]
        waiting = _take(waiting, generate(asked), answers, found)
    return [tuple(entries) for entries in found]


def _take(
    numbers: Sequence[int],
    results: Sequence[Result],
    answers: Sequence[Sequence[int]],
    found: list[list[TokenLogprobs]],
) -> list[int]:
    """Adds what the results tell; the numbers of the answers that are not complete yet."""
    unfinished = []
    for number, result in zip(numbers, results, strict=True):
        answer, entries = answers[number], found[number]
        completion = result.completions[0]
        before = len(entries)
        rest = answer[before:]
        logprobs = completion.logprobs or ()
        for token, said, entry in zip(rest, completion.token_ids, logprobs, strict=False):
            entries.append(entry)
            if said != token:
                break
        if len(entries) == before:
            raise EngineError(f"Request {shown(result.request_id)} brought no log-probabilities")
        if len(entries) < len(answer):
            unfinished.append(number)
    return unfinished
