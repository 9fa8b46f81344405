"""Figures as a table, as JSON, and as a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minipic_backend.plot import draw_bars
from minipic_backend.quality.outcomes import Cost, Figures, Outcome
from minipic_backend.quality.techniques import TechniqueSpec
from minipic_backend.table import format_rows

__all__ = ["Measured", "format_table", "write_json", "write_plot"]


@dataclass(frozen=True, slots=True)
class Measured:
    """One technique with one number of documents.

    Args:
        spec: the technique.
        documents: in each prompt; 0 where questions bring their own.
        figures: of each kind, and of all.
        cost: None before it was measured.
        seconds: it took, cost left out.
        outcomes: of each question.
    """

    spec: TechniqueSpec
    documents: int
    figures: tuple[Figures, ...]
    cost: Cost | None
    seconds: float
    outcomes: tuple[Outcome, ...]

    @property
    def overall(self) -> Figures:
        return self.figures[-1]


def format_table(measured: Sequence[Measured]) -> str:
    """One line for each technique: exact match of each kind and of all, as a share of full
    attention's too; F1, divergence, agreement and cost over all questions."""
    kinds = [figures.kind for figures in measured[0].figures]
    head = ("docs", "technique", *kinds, "/full (95 %)", "F1", "KL", "agree", "recomp.", "TTFT ms")
    rows: list[tuple[str, ...]] = [head]
    for one in measured:
        overall, cost = one.overall, one.cost
        ratio = overall.exact_ratio
        rows.append(
            (
                str(one.documents or "own"),
                one.spec.label,
                *(_share(figures.exact) for figures in one.figures),
                f"{ratio[0]:.3f} ({ratio[1]:.3f}-{ratio[2]:.3f})" if ratio else "-",
                f"{overall.f1[0]:.3f}" if overall.f1 else "-",
                f"{overall.kl[0]:.3f}",
                f"{overall.agreement:.1%}",
                f"{cost.recomputed:.1%}" if cost else "-",
                f"{cost.ttft_ms:.1f}" if cost else "-",
            )
        )
    return "\n".join(format_rows(rows, right={0, *range(2, len(head))}))


def write_json(path: Path, measured: Sequence[Measured], about: dict[str, Any]) -> None:
    """Writes all figures, and every single answer."""
    content = {"about": about, "techniques": [_to_dict(one) for one in measured]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_plot(path: Path, measured: Sequence[Measured], title: str) -> None:
    """Exact match (or agreement, where no answers are known), beside the divergence from full
    attention. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.5 + 0.32 * len(measured)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = list(range(len(measured)))[::-1]
    shares = [one.overall.exact or _point(one.overall.agreement) for one in measured]
    has_answers = all(one.overall.exact for one in measured)
    for axes, values in ((left, shares), (right, [one.overall.kl for one in measured])):
        draw_bars(axes, places, values, height=0.7, color="#7a9cc6")
    left.set_yticks(places, [f"{one.spec.label} ({one.documents or 'own'})" for one in measured])
    left.set_xlabel("exact match" if has_answers else "agreement with full attention")
    right.set_xlabel("KL from full attention, nats a token")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _to_dict(one: Measured) -> dict[str, Any]:
    return {
        "technique": one.spec.label,
        "documents": one.documents,
        "figures": [asdict(figures) for figures in one.figures],
        "cost": asdict(one.cost) if one.cost else None,
        "seconds": round(one.seconds, 2),
        "answers": [
            {
                "question": outcome.number,
                "kind": outcome.kind,
                "text": outcome.text,
                "exact": outcome.exact,
                "f1": outcome.f1,
                "kl": [round(value, 4) for value in outcome.divergences],
                "agree": sum(outcome.agreements),
            }
            for outcome in one.outcomes
        ],
    }


def _share(value: tuple[float, float, float] | None) -> str:
    return f"{value[0]:.1%}" if value else "-"


def _point(value: float) -> tuple[float, float, float]:
    return (value, value, value)
