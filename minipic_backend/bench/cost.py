"""What techniques cost on one engine: time to first token, prompts a second, tokens computed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from minipic_backend.bench.measure import Row
from minipic_backend.errors import ConfigurationError
from minipic_backend.layout.ranking import BM25
from minipic_backend.prompt import Prompt
from minipic_backend.quality.passages import Passage
from minipic_backend.quality.prompts import PromptForm
from minipic_backend.quality.questions import Question
from minipic_backend.quality.techniques import TechniqueSpec, parse_technique
from minipic_backend.results import Result
from minipic_backend.table import format_rows

__all__ = ["CostWork", "draw_work", "format_cost_table", "join_passages", "measure_cost"]

_FULL = parse_technique("full")
_ONE_TOKEN = {"temperature": 0.0, "max_tokens": 1}


@dataclass(frozen=True, slots=True)
class CostWork:
    """The same prompts for every technique. No two have the same first document, nor the same
    documents, so that `full` can reuse nothing but what stands in front of these.

    Args:
        case: what the prompts are made of, in words.
        alone: served one after another.
        together: served at once, for each run.
        first: served before, uncounted: kernels are compiled, and chosen, when they first run.
    """

    case: str
    alone: tuple[Question, ...]
    together: tuple[tuple[Question, ...], ...]
    first: tuple[Question, ...]

    @property
    def documents(self) -> list[Passage]:
        """Each of all prompts' documents once."""
        questions = [*self.first, *self.alone, *(q for run in self.together for q in run)]
        return list(dict.fromkeys(passage for one in questions for passage in one.documents))


def draw_work(
    passages: Sequence[Passage],
    *,
    case: str,
    documents: int,
    sample: int,
    prompts: int,
    runs: int = 1,
    seed: int = 0,
) -> CostWork:
    """Prompts over as many passages as there are prompts, so that each of these occurs in
    `documents` of them on average.

    Args:
        passages: to draw from; the first ones are used.
        case: a name.
        documents: in each prompt.
        sample: prompts served alone.
        prompts: served together, in each run.
        runs: of these.
        seed: the same seed draws the same prompts.

    Raises:
        ConfigurationError: too few passages.
    """
    num_first = 2 + max(2, prompts // 10)
    number = num_first + sample + prompts * runs
    needed = max(number, documents + 3)
    if len(passages) < needed:
        raise ConfigurationError(
            f"{case}: {number} prompts need {needed} documents; {len(passages)} can be made. Ask "
            "for fewer prompts, or bring more passages"
        )
    pool = list(passages[:needed])
    rng = random.Random(seed)
    rng.shuffle(pool)
    bm25 = BM25(passage.whole for passage in pool)
    seen: set[frozenset[Passage]] = set()
    questions = [_question(head, pool, documents, bm25, seen, rng) for head in pool[:number]]
    first, rest = questions[:num_first], questions[num_first:]
    alone, rest = rest[:sample], rest[sample:]
    together = tuple(tuple(rest[run * prompts :][:prompts]) for run in range(runs))
    return CostWork(case, tuple(alone), together, tuple(first))


def join_passages(
    passages: Sequence[Passage], num_tokens: int, engine: Any, show: Callable[[Passage], str]
) -> list[Passage]:
    """Documents of about `num_tokens` tokens each (engine's tokenizer, the title included): whole
    passages one behind another, the last one cut. No passage is used twice.

    Args:
        passages: to join.
        num_tokens: of a document.
        engine: whose tokenizer counts.
        show: a passage as the model reads it.
    """
    joined: list[Passage] = []
    part: list[Passage] = []
    length = 0
    for passage in passages:
        part.append(passage)
        length += len(engine.token_ids(show(passage)))
        if length >= num_tokens:
            title = part[0].title
            text = "\n\n".join([part[0].text, *map(show, part[1:])])
            room = num_tokens - len(engine.token_ids(show(Passage(title, ""))))
            cut = engine.tokenizer.decode(engine.token_ids(text)[: max(1, room)])
            joined.append(Passage(title, cut.rstrip("\N{REPLACEMENT CHARACTER}")))
            part, length = [], 0
    return joined


def measure_cost(
    engine: Any, work: CostWork, spec: TechniqueSpec, form: PromptForm
) -> Iterator[Row]:
    """Three figures of a technique, on an engine that has computed every document before.

    - anew: tokens computed over the tokens of the same prompt without spans, prompts alone.
    - ttft: milliseconds from the call to the first token, layout included, one prompt at a time.
    - throughput: prompts a second, submitted together, one token each.

    Args:
        engine: an `Engine`; its cache is emptied first.
        work: the prompts.
        spec: the technique.
        form: how questions are put.
    """

    def prompts(questions: Sequence[Question], chosen: TechniqueSpec = spec) -> list[Prompt]:
        return [form.prompt(question, chosen, question.ranks) for question in questions]

    def run(given: Prompt | list[Prompt]) -> Any:
        return engine.generate(given, **spec.options, **_ONE_TOKEN)

    first, alone = prompts(work.first), prompts(work.alone)
    engine.reset_cache()
    engine.warm([form.show(one) for one in work.documents], prompt=first[0], **spec.options)
    run(first[2:])
    for prompt in first[:2]:
        run(prompt)

    results: list[Result] = [run(prompt) for prompt in alone]
    full = prompts(work.alone, _FULL)
    plain = [engine.count_prompt_tokens(prompt, technique="full") for prompt in full]
    shares = [_computed(one) / tokens for one, tokens in zip(results, plain, strict=True)]
    layout = []
    for prompt in alone:
        started = time.perf_counter()
        engine.count_prompt_tokens(prompt, **spec.options)
        layout.append(1000 * (time.perf_counter() - started))
    details = {
        "plain_tokens": round(fmean(plain), 1),
        "prompt_tokens": round(fmean(one.usage.prompt_tokens for one in results), 1),
        "computed_tokens": round(fmean(map(_computed, results)), 1),
        "layout_ms": round(median(layout), 3),
    }
    yield Row("anew", work.case, spec.label, "share", tuple(shares), details)
    ttft = tuple(1000 * one.timing.ttft_s for one in results)
    yield Row("ttft", work.case, spec.label, "ms", ttft, details)

    speeds, spans_missed = [], 0
    for questions in work.together:
        batch = prompts(questions)
        started = time.perf_counter()
        done: list[Result] = run(batch)
        speeds.append(len(batch) / (time.perf_counter() - started))
        spans_missed += sum(one.usage.span_tokens_computed or 0 for one in done)
    details = {
        "prompts": len(batch),
        "computed_tokens": round(fmean(map(_computed, done)), 1),
        "documents": len(work.documents),
        "span_tokens_missed": spans_missed,
    }
    yield Row("throughput", work.case, spec.label, "prompts/s", tuple(speeds), details)


def format_cost_table(rows: Sequence[Row]) -> str:
    """A line for each case and technique, ratios to `full` where that was measured."""
    head = ("documents", "technique", "TTFT ms", "min-max", "/ full", "prompts/s", "/ full", "anew")
    found = {(row.case, row.variant, row.bench): row for row in rows}
    lines: list[tuple[str, ...]] = [(*head, "layout ms")]
    for row in rows:
        if row.bench == "throughput":  # the last of a technique
            ttft, anew = (found[row.case, row.variant, name] for name in ("ttft", "anew"))
            lines.append(
                (
                    row.case,
                    row.variant,
                    f"{ttft.median:.1f}",
                    f"{min(ttft.values):.1f}-{max(ttft.values):.1f}",
                    _ratio(ttft, found),
                    f"{row.median:.4g}",
                    _ratio(row, found),
                    f"{anew.median:.1%}",
                    f"{anew.details['layout_ms']:.1f}",
                )
            )
    return "\n".join(format_rows(lines, right=range(2, len(lines[0]))))


def _question(
    head: Passage,
    pool: Sequence[Passage],
    documents: int,
    bm25: BM25,
    seen: set[frozenset[Passage]],
    rng: random.Random,
) -> Question:
    """`head` and other passages in random order, and a question about one of them."""
    shown = [head]
    for _ in range(1000):
        others = [passage for passage in rng.sample(pool, documents) if passage != head]
        shown = [head, *others][:documents]
        if frozenset(shown) not in seen:
            break
    else:
        raise ConfigurationError(
            f"{documents} documents a prompt: too few passages for that. Bring more, or ask for "
            "fewer by --documents"
        )
    seen.add(frozenset(shown))
    about = rng.choice(shown)
    text = f"What do the documents say about {about.subject}?"
    ranks = bm25.ranks(text, [passage.whole for passage in shown])
    return Question("cost", text, (), tuple(shown), tuple(ranks), (shown.index(about),))


def _computed(result: Result) -> int:
    return result.usage.prompt_tokens - (result.usage.cached_tokens or 0)


def _ratio(row: Row, found: dict[tuple[str, str, str], Row]) -> str:
    base = found.get((row.case, _FULL.label, row.bench))
    return f"{row.median / base.median:.3f}" if base else ""
