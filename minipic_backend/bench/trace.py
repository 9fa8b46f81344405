"""RAG traffic: passages, and samples that draw on them, each a prefix, ten passages, a question."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from minipic_backend.bench.prompts import FIRST_ID, LAST_ID, RandomPrompts, passage_lengths
from minipic_backend.errors import ConfigurationError, shown

__all__ = ["NUM_PASSAGES", "Trace", "Workload", "draw_workload", "random_trace", "read_trace"]

NUM_PASSAGES = 10
"""Passages of one sample."""

_PIECE = re.compile(r"\w{1,5}|[^\w\s]")
"""Stands in for a tokenizer, which models with random weights have none of: as many pieces, to 1 %,
as SmolLM2's has tokens for English Wikipedia (correlation 0.99)."""

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Passages as token ids; none is a marker."""

    name: str
    passages: tuple[Ids, ...]


def read_trace(path: Path) -> Trace:
    """A JSONL file of passages {"title": …, "text": …}.

    Raises:
        ConfigurationError: no such file, or a line that is no passage.
    """
    passages = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"--trace {path}: {error.strerror}") from error
    for number, line in enumerate(filter(None, lines), 1):
        try:
            passage = json.loads(line)
            text = f"{passage.get('title', '')}\n{passage['text']}"
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigurationError(
                f"--trace {path}, line {number}: not a passage with a text ({shown(error)})"
            ) from error
        passages.append(_ids(text))
    return Trace(path.name, tuple(passages))


def random_trace(num_passages: int, seed: int = 0) -> Trace:
    """Passages of random tokens, as long as those of 2WikiMultihopQA."""
    source = RandomPrompts(seed, 1)
    lengths = passage_lengths((num_passages,), seed).tolist()
    return Trace("random", tuple(tuple(source.tokens(int(length))) for length in lengths))


@dataclass(frozen=True, slots=True)
class Workload:
    """Samples over a trace.

    Args:
        trace: the passages.
        samples: the passages of each, by index; every passage that is used at all is distinct
            within its sample.
        prefix: tokens in front of all of them.
        questions: one for each sample, all different.
    """

    trace: Trace
    samples: tuple[Ids, ...]
    prefix: Ids
    questions: tuple[Ids, ...]

    @property
    def num_distinct(self) -> int:
        return len({passage for sample in self.samples for passage in sample})

    @property
    def reuse(self) -> float:
        """How often a passage is used, on average."""
        return sum(map(len, self.samples)) / self.num_distinct

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts, without markers and pads: what stock vLLM gets."""
        return sum(map(len, self.plain()))

    @property
    def num_needed_tokens(self) -> int:
        """Tokens that a cache without limit must still compute: the prefix and each passage once,
        and every question."""
        distinct = {passage for sample in self.samples for passage in sample}
        passages = sum(len(self.trace.passages[passage]) for passage in distinct)
        return len(self.prefix) + passages + sum(map(len, self.questions))

    def plain(self) -> Iterator[list[int]]:
        """Ordinary prompts."""
        for sample, question in zip(self.samples, self.questions, strict=True):
            documents = (token for i in sample for token in self.trace.passages[i])
            yield [*self.prefix, *documents, *question]

    def with_spans(self, source: RandomPrompts) -> Iterator[list[int]]:
        """The same with a span for each passage."""
        spans = [source.as_span(passage) for passage in self.trace.passages]
        prefix = source.as_prefix(self.prefix)
        for sample, question in zip(self.samples, self.questions, strict=True):
            documents = (token for i in sample for token in spans[i])
            yield [*prefix, *documents, *source.as_question(question)]


def draw_workload(trace: Trace, num_samples: int, reuse: float | None, seed: int = 0) -> Workload:
    """Samples that use each of their passages at least once, in random order.

    Args:
        trace: passages to draw from.
        num_samples: how many.
        reuse: how often each passage is used, on average: fewer of the trace's passages for more.
            None: as many passages as there are.
        seed: the same seed draws the same samples.

    Raises:
        ConfigurationError: too few passages for one sample, or for so little reuse.
    """
    num_slots = num_samples * NUM_PASSAGES
    distinct = min(len(trace.passages), num_slots)
    if reuse is not None:
        distinct = round(num_slots / reuse)
        if distinct > len(trace.passages):
            raise ConfigurationError(
                f"{num_samples} samples with reuse {reuse} need {distinct} passages; the trace has "
                f"{len(trace.passages)}"
            )
    if distinct < NUM_PASSAGES:
        raise ConfigurationError(f"A sample has {NUM_PASSAGES} passages; here are {distinct}")
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(len(trace.passages))[:distinct]
    slots = np.concatenate([chosen, rng.choice(chosen, num_slots - distinct)])
    samples = [_distinct(row, chosen, rng) for row in rng.permutation(slots).reshape(-1, 10)]
    words = RandomPrompts(seed + 1, 1)
    questions = tuple(tuple(words.tokens(48)) for _ in range(num_samples))
    return Workload(trace, tuple(samples), tuple(words.tokens(60)), questions)


def _distinct(row: Any, chosen: Any, rng: np.random.Generator) -> Ids:
    """A sample without repetitions: the second of two is drawn anew."""
    sample: dict[int, None] = {}
    for passage in row.tolist():
        while passage in sample:
            passage = int(rng.choice(chosen))
        sample[passage] = None
    return tuple(sample)


def _ids(text: str) -> Ids:
    span = LAST_ID - FIRST_ID
    return tuple(FIRST_ID + crc32(piece.encode()) % span for piece in _PIECE.findall(text))
