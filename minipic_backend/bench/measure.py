"""What is measured, on one engine or on several in turns: rows of figures, each the median of
several runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, pairwise
from typing import Any

from minipic_backend.bench.engines import Served, Session
from minipic_backend.bench.options import PREFIX_TOKENS, QUESTION_TOKENS
from minipic_backend.bench.prompts import RandomPrompts, wiki_shaped_lengths
from minipic_backend.errors import EngineError

__all__ = [
    "Row",
    "count_decode",
    "count_throughput",
    "count_ttft",
    "measure_capacity",
    "measure_decode",
    "measure_throughput",
    "measure_ttft",
]

_HITS = 3
"""Prompts with a new question behind the same documents, in each run of `measure_ttft`."""

_EXACT, _WARM = "exact prefix, no spans", "warm spans"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Args:
        bench: "capacity", "throughput", "ttft" or "decode".
        case: what was asked of the engine.
        variant: the engine.
        unit: of the values.
        values: one for each run.
        details: token counts and the like.
    """

    bench: str
    case: str
    variant: str
    unit: str
    values: tuple[float, ...]
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "median": self.median}


def measure_capacity(session: Session) -> Row:
    """Tokens that the KV cache holds, as the engine sized it."""
    num_blocks = session.driver.call(lambda llm: llm.vllm_config.cache_config.num_gpu_blocks)
    tokens = float((num_blocks or 0) * session.block_size)
    return Row("capacity", "KV cache", session.variant, "tokens", (tokens,))


def count_throughput(*, samples: int, runs: int) -> int:
    """Prompts that `measure_throughput` serves on each engine."""
    return samples * (runs + 1)


def measure_throughput(*sessions: Session, samples: int, runs: int, seed: int = 0) -> Iterable[Row]:
    """Prefill of 2Wiki-shaped ordinary prompts, one token each: samples per second.

    Several engines take turns, as in `measure_ttft`.
    """
    lengths = wiki_shaped_lengths(samples, seed)
    values: list[list[float]] = [[] for _ in sessions]
    for run, number in _turns(len(sessions), runs + 1):
        prompts = RandomPrompts(seed + 1 + run, sessions[number].block_size)
        batch = [prompts.tokens(length) for length in lengths]
        started = time.perf_counter()
        sessions[number].serve(batch)
        if run:  # the first one warms up
            values[number].append(samples / (time.perf_counter() - started))
    details = [{"samples": samples, "tokens": sum(lengths)}] * len(sessions)
    yield from _rows("throughput", "no spans", sessions, "samples/s", values, details)


def count_ttft(*, has_spans: bool, runs: int) -> int:
    """Prompts that `measure_ttft` serves on one engine."""
    return (1 + _HITS) * (2 if has_spans else 1) * (runs + 1)


def measure_ttft(
    *sessions: Session, documents: int, document_tokens: int, runs: int, seed: int = 0
) -> Iterable[Row]:
    """Time to first token of one prompt of documents and a 50-token question.

    Cold: nothing cached. Exact prefix: all but the question was seen in this order (ordinary
    prompts). Warm spans: the documents were seen, in another order.

    Several engines take turns, round by round, the last one of a round first in the next: what the
    host does meanwhile meets all of them. `details` then has paired ratios to the first engine.
    """
    sources = [RandomPrompts(seed, session.block_size) for session in sessions]
    rounds: list[list[_Round]] = [[] for _ in sessions]
    for run, number in _turns(len(sessions), runs + 1):
        done = _ttft_round(sessions[number], sources[number], documents, document_tokens)
        if run:  # the first one warms up
            rounds[number].append(done)
    for number, (session, own) in enumerate(zip(sessions, rounds, strict=True)):
        for name in own[0].ttft_ms:
            values = tuple(ms for one in own for ms in one.ttft_ms[name])
            last = own[-1]
            details = {"tokens": last.num_tokens[name], "cached": last.num_cached[name]}
            if number:
                details |= _paired(name, own, rounds[0])
            case = f"{documents} x {document_tokens}: {name}"
            yield Row("ttft", case, session.variant, "ms", values, details)


@dataclass(slots=True)
class _Round:
    """A round of `measure_ttft` on one engine: by case, milliseconds of each prompt, tokens of the
    last one, pads included, and how many of those were cached."""

    ttft_ms: dict[str, list[float]] = field(default_factory=dict)
    num_tokens: dict[str, int] = field(default_factory=dict)
    num_cached: dict[str, int] = field(default_factory=dict)


def _ttft_round(
    session: Session, source: RandomPrompts, documents: int, document_tokens: int
) -> _Round:
    done = _Round()

    def note(name: str, prompt: list[int]) -> None:
        served = session.serve([prompt])[0]
        done.ttft_ms.setdefault(name, []).append(1000 * served.ttft_s)
        done.num_tokens[name] = len(prompt)
        done.num_cached[name] = served.num_cached_tokens

    session.reset_cache()
    prefix = source.prefix(PREFIX_TOKENS)
    body = source.tokens(documents * document_tokens)
    note("cold, no spans", prefix + body + source.tokens(QUESTION_TOKENS))
    for _ in range(_HITS):
        note(_EXACT, prefix + body + source.tokens(QUESTION_TOKENS))
    if session.has_spans:
        spans = [source.span(document_tokens) for _ in range(documents)]
        note("cold spans", _span_prompt(source, prefix, spans))
        for _ in range(_HITS):
            note(_WARM, _span_prompt(source, prefix, source.shuffled(spans)))
    return done


def _span_prompt(
    source: RandomPrompts, prefix: Sequence[int], spans: Sequence[Sequence[int]]
) -> list[int]:
    """Prefix, spans, and a new question."""
    return [*prefix, *chain.from_iterable(spans), *source.question(QUESTION_TOKENS)]


def _paired(name: str, rounds: list[_Round], base: list[_Round]) -> dict[str, Any]:
    """A case against the same one of the base, or else warm spans against its exact prefix: the
    ratio of the medians of each round, and the median of these ratios."""
    other = _EXACT if name == _WARM and name not in base[0].ttft_ms else name
    if other not in base[0].ttft_ms:
        return {}
    medians = [
        [statistics.median(one.ttft_ms[case]) for one in by]
        for case, by in ((name, rounds), (other, base))
    ]
    return _pairs(other, *medians)


def _turns(engines: int, rounds: int) -> Iterator[tuple[int, int]]:
    """(round, engine): each engine once a round, the last one of a round first in the next."""
    order = list(range(engines))
    for number in range(rounds):
        yield from ((number, engine) for engine in order)
        order.reverse()


def _pairs(other: str, values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """The ratio of each round, and the median of these ratios; `other`: the base's case."""
    ratios = [one / two for one, two in zip(values, base, strict=True)]
    return {
        "paired_with": other,
        "paired_ratio": statistics.median(ratios),
        "paired_ratios": ratios,
    }


def _rows(
    bench: str,
    case: str,
    sessions: Sequence[Session],
    unit: str,
    values: Sequence[Sequence[float]],
    details: Sequence[Mapping[str, Any]],
) -> Iterator[Row]:
    """A row for each engine, paired with the first one's."""
    for session, own, about in zip(sessions, values, details, strict=True):
        pairs = _pairs(case, own, values[0]) if own is not values[0] else {}
        yield Row(bench, case, session.variant, unit, tuple(own), {**about, **pairs})


def count_decode(*, batch: int, runs: int) -> int:
    """Prompts that `measure_decode` serves on each engine."""
    return batch * (runs + 1)


def measure_decode(
    *sessions: Session,
    batch: int,
    context: int,
    documents: int = 0,
    steps: int = 128,
    runs: int = 2,
    seed: int = 0,
) -> Iterable[Row]:
    """Milliseconds per step while `batch` requests of `context` tokens decode together.

    Caches are emptied first. Several engines take turns, as in `measure_ttft`.

    Args:
        sessions: the engines.
        batch: requests.
        context: prompt tokens of each.
        documents: spans that the context consists of, on engines that have spans; 0 for none.
        steps: tokens that each request generates.
        runs: repetitions, on the cached prompts of the first.
        seed: of the prompts.

    Raises:
        EngineError: an engine that does not run all of them at once.
    """
    case = f"{batch} x {context}" + (f" in {documents} documents" if documents else ", no spans")
    prompts: list[list[list[int]]] = []
    for session in sessions:
        session.reset_cache()
        prompts.append(_decode_prompts(session, batch, context, documents, seed))
    values: list[list[float]] = [[] for _ in sessions]
    for run, number in _turns(len(sessions), runs + 1):
        served = sessions[number].serve(prompts[number], max_tokens=steps)
        if run:
            values[number].append(_step_ms(served, case, sessions[number].variant))
    details = [
        {"steps": steps, "spans": documents > 0 and session.has_spans, "tokens": [len(own[0])]}
        for session, own in zip(sessions, prompts, strict=True)
    ]
    yield from _rows("decode", case, sessions, "ms/step", values, details)


def _step_ms(served: Sequence[Served], case: str, variant: str) -> float:
    """Milliseconds of a step, from when all requests decode until the first is done."""
    begin = max(one.token_times[0] for one in served)
    end = min(one.token_times[-1] for one in served)
    times = sorted({t for t in served[0].token_times if begin <= t <= end})
    gaps = [1000 * (b - a) for a, b in pairwise(times)]
    if not gaps:
        raise EngineError(
            f"decode {case}: {variant} does not run all of them at once: its cache holds too few "
            "tokens, or max_num_seqs allows fewer requests. Choose other cases with --decode"
        )
    return statistics.median(gaps)


def _decode_prompts(
    session: Session, batch: int, context: int, documents: int, seed: int
) -> list[list[int]]:
    source = RandomPrompts(seed, session.block_size)
    if not (documents and session.has_spans):
        return [source.tokens(context) for _ in range(batch)]
    prefix = source.prefix(PREFIX_TOKENS)
    length = (context - PREFIX_TOKENS - QUESTION_TOKENS) // documents
    return [
        _span_prompt(source, prefix, [source.span(length) for _ in range(documents)])
        for _ in range(batch)
    ]
