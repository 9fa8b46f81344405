"""The validation curve, and when it says to stop."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Curve", "Point"]

_WORTH_IT = 0.95
"""An adapter must bring the divergence below this share of what it was without."""
_GAIN = 0.99
"""A value below this share of the best so far is a gain."""


@dataclass(frozen=True, slots=True)
class Point:
    """Means over the validation set.

    Args:
        step: optimizer steps so far; 0 is the model as it came.
        kl: divergence of the student from the teacher at the answers' tokens, nats.
        agreement: share of the answers' tokens where both would say the same.
        seconds: since the start.
    """

    step: int
    kl: float
    agreement: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no word for what is not a number: None."""
        return {**asdict(self), "kl": self.kl if math.isfinite(self.kl) else None}


@dataclass
class Curve:
    """Points in order.

    Args:
        patience: points without a gain after which to stop.
        trial: points after which an adapter that does not help is given up.
    """

    patience: int = 6
    trial: int = 4
    points: list[Point] = field(default_factory=list)

    def add(self, point: Point) -> bool:
        """Adds a point; True where it is the best so far."""
        self.points.append(point)
        return self.best is point

    @property
    def baseline(self) -> Point:
        return self.points[0]

    @property
    def best(self) -> Point:
        return min(self.points, key=lambda point: (not math.isfinite(point.kl), point.kl))

    @property
    def helps(self) -> bool:
        """Whether the best point is worth an adapter."""
        return self.best.kl <= _WORTH_IT * self.baseline.kl

    def reason_to_stop(self) -> str | None:
        """Why going on makes no sense; None where it does."""
        if not math.isfinite(self.points[-1].kl):
            return "the divergence on held-out documents is no finite number any more"
        if len(self.points) > self.trial and not self.helps:
            return (
                f"no help: after {self.points[-1].step} steps the divergence on held-out "
                f"documents is {self.points[-1].kl:.4f}, without an adapter {self.baseline.kl:.4f}"
            )
        since = 0
        lowest = self.baseline.kl
        for point in self.points[1:]:
            since += 1
            if point.kl < _GAIN * lowest:
                since = 0
            lowest = min(lowest, point.kl)
        if since >= self.patience:
            return f"no gain in the last {since} validations"
        return None

    def to_dict(self) -> dict[str, Any]:
        return {
            "points": [point.to_dict() for point in self.points],
            "best": self.best.to_dict(),
            "helps": self.helps,
        }
