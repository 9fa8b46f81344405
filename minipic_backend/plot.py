"""Bars for plots of figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["draw_bars"]


def draw_bars(
    axes: Any,
    places: Sequence[float],
    values: Sequence[tuple[float, float, float]],
    **style: Any,
) -> Any:
    """Horizontal bars with what they spread over as error bars, on a grid.

    Args:
        axes: matplotlib's.
        places: of the bars, along the vertical axis.
        values: (middle, low, high) of each.
        style: of the bars, as `Axes.barh` takes it.

    Returns:
        matplotlib's container of the bars.
    """
    errors = [
        [max(0.0, middle - low) for middle, low, _ in values],
        [max(0.0, high - middle) for middle, _, high in values],
    ]
    axes.set_axisbelow(True)
    axes.grid(axis="x", alpha=0.3)
    return axes.barh(places, [value[0] for value in values], xerr=errors, ecolor="#334", **style)
