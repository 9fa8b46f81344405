"""One prompt under several techniques."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from minipic_backend.engines.teacher import TokenLogprobs
from minipic_backend.prompt import Prompt
from minipic_backend.quality.divergence import agrees, divergence
from minipic_backend.quality.techniques import TechniqueSpec, parse_technique
from minipic_backend.results import Explanation, Result
from minipic_backend.table import format_rows

__all__ = ["DEFAULT_TECHNIQUES", "Comparison", "ScoringEngine", "TechniqueAnswer", "compare"]

DEFAULT_TECHNIQUES: tuple[str, ...] = ("full", "primed", "primed:late=0", "block_attention")


class ScoringEngine(Protocol):
    """What comparing needs of an engine; `Engine` has it."""

    def generate(self, prompt: Any, **options: Any) -> Any: ...

    def explain(self, prompt: Prompt | str, **options: Any) -> Explanation: ...

    def score(
        self,
        prompts: Sequence[Prompt | str],
        answers: Sequence[Sequence[int]],
        *,
        top: int = 20,
        begun: Sequence[Result] | None = None,
        **options: Any,
    ) -> list[tuple[TokenLogprobs, ...]]: ...


@dataclass(frozen=True, slots=True)
class TechniqueAnswer:
    """One technique's answer to a prompt.

    Args:
        technique: as it was asked for.
        text: its answer.
        same_text: whether full attention answers the same, word for word.
        divergence: mean KL(full ‖ technique) in nats along full attention's answer
            (`quality.divergence`).
        worst_divergence: the largest at one token.
        agreement: share of full attention's tokens that the technique would say next, too.
        num_prompt_tokens: tokens of the prompt in its layout.
        num_cached_tokens: those that were read from the cache this time.
    """

    technique: str
    text: str
    same_text: bool
    divergence: float
    worst_divergence: float
    agreement: float
    num_prompt_tokens: int
    num_cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What each technique answers to one prompt; `print` it for a table."""

    answers: tuple[TechniqueAnswer, ...]

    def __str__(self) -> str:
        rows = [("technique", "KL", "worst", "agree", "tokens", "cached", "answer")]
        for one in self.answers:
            rows.append(
                (
                    one.technique,
                    f"{one.divergence:.3f}",
                    f"{one.worst_divergence:.3f}",
                    f"{one.agreement:.0%}",
                    str(one.num_prompt_tokens),
                    "?" if one.num_cached_tokens is None else str(one.num_cached_tokens),
                    ("= " if one.same_text else "  ") + " ".join(one.text.split()),
                )
            )
        return "\n".join(format_rows(rows, right={1, 2, 3, 4, 5}))


def compare(
    engine: ScoringEngine,
    prompt: Prompt | str,
    techniques: Sequence[str] = DEFAULT_TECHNIQUES,
    *,
    max_tokens: int = 64,
) -> Comparison:
    """See `Engine.compare`."""
    specs = [parse_technique(text) for text in techniques]
    greedy = {"temperature": 0.0, "logprobs": 20, "max_tokens": max_tokens}
    full = engine.generate(prompt, technique="full", **greedy)
    (truth,) = engine.score([prompt], [full.token_ids], begun=[full], technique="full")
    return Comparison(tuple(_answer(engine, prompt, spec, full, truth, greedy) for spec in specs))


def _answer(
    engine: ScoringEngine,
    prompt: Prompt | str,
    spec: TechniqueSpec,
    full: Result,
    truth: tuple[TokenLogprobs, ...],
    greedy: dict[str, Any],
) -> TechniqueAnswer:
    is_full = dict(spec.options) == {"technique": "full"}
    result = full if is_full else engine.generate(prompt, **spec.options, **greedy)
    (along,) = engine.score([prompt], [full.token_ids], begun=[result], **spec.options)
    apart = [divergence(p, q) for p, q in zip(truth, along, strict=True)]
    same = [agrees(p, q) for p, q in zip(truth, along, strict=True)]
    return TechniqueAnswer(
        technique=spec.label,
        text=result.text,
        same_text=result.text == full.text,
        divergence=sum(apart) / len(apart),
        worst_divergence=max(apart),
        agreement=sum(same) / len(same),
        num_prompt_tokens=result.usage.prompt_tokens,
        num_cached_tokens=result.usage.cached_tokens,
    )
