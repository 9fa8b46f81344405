"""What a technique did with each question, and the figures that come of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from minipic_backend.quality.intervals import bootstrap, paired_ratio, wilson

__all__ = ["Cost", "Figures", "Outcome", "summarize"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One question under one technique.

    Args:
        number: of the question.
        kind: of the question.
        text: the answer.
        exact: it is a right answer, after SQuAD's normalization; None where none is known.
        contained: a right answer stands in it.
        f1: word overlap with a right answer.
        divergences: KL(full ‖ technique), nats, at each token of full attention's answer.
        agreements: whether both would say the same there.
    """

    number: int
    kind: str
    text: str
    exact: bool | None
    contained: bool | None
    f1: float | None
    divergences: tuple[float, ...]
    agreements: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a technique costs where every document was seen before, in another order.

    Args:
        recomputed: tokens computed beyond the question itself, over the documents' tokens.
        ttft_s: seconds to the first token, each of the sample.
    """

    recomputed: float
    ttft_s: tuple[float, ...]

    @property
    def ttft_ms(self) -> float:
        """The median, in milliseconds."""
        return 1000 * median(self.ttft_s)


@dataclass(frozen=True, slots=True)
class Figures:
    """A technique's figures over a group of questions. Intervals are 95 %.

    Args:
        kind: of the questions, or "all".
        count: questions.
        exact: share answered exactly, with Wilson's interval; None where no answers are known.
        exact_ratio: `exact` over full attention's, with a paired bootstrap interval.
        contained: share with a right answer in them.
        f1: mean, with a bootstrap interval.
        kl: mean over questions of the mean over the answer's tokens, with a bootstrap interval.
        first_kl: mean at the answer's first token.
        agreement: share of the answers' tokens on which both agree.
    """

    kind: str
    count: int
    exact: tuple[float, float, float] | None
    exact_ratio: tuple[float, float, float] | None
    contained: float | None
    f1: tuple[float, float, float] | None
    kl: tuple[float, float, float]
    first_kl: float
    agreement: float


def summarize(outcomes: Sequence[Outcome], full: Sequence[Outcome]) -> list[Figures]:
    """Figures of each kind, and of all where there are several.

    Args:
        outcomes: of one technique.
        full: full attention's, on the same questions in the same order.
    """
    kinds = list(dict.fromkeys(outcome.kind for outcome in outcomes))
    groups = [*kinds, "all"] if len(kinds) > 1 else kinds
    result = []
    for kind in groups:
        chosen = [i for i, outcome in enumerate(outcomes) if kind in ("all", outcome.kind)]
        result.append(_figures(kind, [outcomes[i] for i in chosen], [full[i] for i in chosen]))
    return result


def _figures(kind: str, outcomes: Sequence[Outcome], full: Sequence[Outcome]) -> Figures:
    known = [i for i, outcome in enumerate(outcomes) if outcome.exact is not None]
    exact = [float(bool(outcomes[i].exact)) for i in known]
    truth = [float(bool(full[i].exact)) for i in known]
    f1 = [outcomes[i].f1 or 0.0 for i in known]
    kl = [fmean(outcome.divergences) for outcome in outcomes if outcome.divergences]
    ratio = fmean(exact) / fmean(truth) if known and any(truth) else None
    return Figures(
        kind=kind,
        count=len(outcomes),
        exact=(fmean(exact), *wilson(int(sum(exact)), len(exact))) if known else None,
        exact_ratio=(ratio, *paired_ratio(exact, truth)) if ratio is not None else None,
        contained=_mean(float(bool(outcomes[i].contained)) for i in known),
        f1=(fmean(f1), *bootstrap(f1)) if known else None,
        kl=(_mean(kl) or 0.0, *bootstrap(kl)),
        first_kl=_mean(o.divergences[0] for o in outcomes if o.divergences) or 0.0,
        agreement=_mean(float(a) for o in outcomes for a in o.agreements) or 0.0,
    )


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
