"""95 % confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["bootstrap", "paired_ratio", "wilson"]

_Z = 1.959964  # 97.5 % of the normal distribution lie below it
_Array = npt.NDArray[np.float64]


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's score interval of a share (E. B. Wilson, 1927); (0, 1) for no trials."""
    if not trials:
        return (0.0, 1.0)
    share, z2 = successes / trials, _Z * _Z
    middle = share + z2 / (2 * trials)
    half = _Z * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    scale = 1 + z2 / trials
    return (max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale))


def bootstrap(values: Sequence[float], *, rounds: int = 1000, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the mean; (nan, nan) for no values."""
    return _percentiles([values], lambda sample: sample[0].mean(axis=-1), rounds, seed)


def paired_ratio(
    values: Sequence[float], baseline: Sequence[float], *, rounds: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of mean(values) / mean(baseline), the same prompts drawn for both."""

    def ratio(samples: list[_Array]) -> _Array:
        top, bottom = (sample.mean(axis=-1) for sample in samples)
        ratios: _Array = np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > 0)
        return ratios

    return _percentiles([values, baseline], ratio, rounds, seed)


def _percentiles(
    columns: Sequence[Sequence[float]],
    statistic: Callable[[list[_Array]], _Array],
    rounds: int,
    seed: int,
) -> tuple[float, float]:
    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    if not arrays[0].size:
        return (math.nan, math.nan)
    drawn = np.random.default_rng(seed).integers(0, arrays[0].size, (rounds, arrays[0].size))
    low, high = np.nanpercentile(statistic([array[drawn] for array in arrays]), [2.5, 97.5])
    return (float(low), float(high))
