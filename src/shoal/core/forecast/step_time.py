"""Step time: the mean seconds of the steps to come, from blocks of past ones; and whether those show a trend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from shoal.core.forecast.blocks import Block
from shoal.core.forecast.estimate import Estimate

# Below so many blocks neither their variance nor a trend is known.
MIN_BLOCKS = 3
MIN_BLOCKS_OF_TREND = 12
# Groups of blocks whose means are compared.
MIN_GROUPS = 5
DRIFT = 0.03
# Relative error of a step time whose variance is not known.
UNKNOWN_SD = 0.3
MAX_CORRELATION = 0.9
# A trend counts if it is this many standard errors from zero and changes the step time by so much within the log.
TREND_ERRORS = 6.0
TREND_CHANGE = 0.1


def step_time(blocks: Sequence[Block], steps_left: int, drift: float = DRIFT) -> Estimate:
    """Return the mean seconds of the next `steps_left` steps; `blocks` must not be empty.

    `drift` is the relative standard deviation of what no block shows: the machine of later is not that of now.
    """
    steps, seconds = sum(block.steps for block in blocks), sum(block.seconds for block in blocks)
    mean_s = seconds / steps
    if len(blocks) < MIN_BLOCKS:
        return Estimate(mean_s, UNKNOWN_SD * mean_s)
    error, freedom = _error_of_mean([block.step_s for block in blocks])
    left_s = steps_left * mean_s
    # The steps to come vary as those that were seen, and by the drift the more the longer they go on.
    variance = error**2 * (1 + seconds / max(left_s, seconds / len(blocks)))
    variance += (drift * mean_s) ** 2 * left_s / (left_s + seconds)
    return Estimate(mean_s, math.sqrt(variance), freedom)


def _error_of_mean(times: Sequence[float]) -> tuple[float, float]:
    """Return the standard error of the mean of correlated times, and its degrees of freedom (batch means).

    Groups of neighbours are less correlated the longer they are. The length that shows the largest error counts.
    """
    errors = []
    size = 1
    while size == 1 or len(times) // size >= MIN_GROUPS:
        count = len(times) // size
        first = len(times) - count * size
        means = [fmean(times[at : at + size]) for at in range(first, len(times), size)]
        deviations = _deviations(means)
        errors.append((math.sqrt(_product(deviations, deviations) / (count - 1) / count), count - 1.0))
        size *= 2
    return max(errors)


def trend(blocks: Sequence[Block]) -> float:
    """Return by which fraction the step time changes over the blocks, 0 if it does not change for certain."""
    count = len(blocks)
    if count < MIN_BLOCKS_OF_TREND:
        return 0.0
    times = [block.step_s for block in blocks]
    places = [at / (count - 1) - 0.5 for at in range(count)]
    spread = _product(places, places)
    slope = _product(places, times) / spread
    residuals = [time - slope * place for time, place in zip(_deviations(times), places, strict=True)]
    correlation = _correlation(residuals)
    variance = _product(residuals, residuals) / (count - 2) * (1 + correlation) / (1 - correlation)
    error = math.sqrt(variance / spread)
    change = slope / fmean(times)
    return change if abs(slope) > TREND_ERRORS * error and abs(change) > TREND_CHANGE else 0.0


def _correlation(deviations: Sequence[float]) -> float:
    """Return the correlation of neighbours, corrected for the bias of short series (Kendall) and bounded to 0 … 0.9."""
    total = _product(deviations, deviations)
    if total == 0.0:
        return 0.0
    raw = _product(deviations[1:], deviations[:-1]) / total
    return min(max(raw + (1 + 3 * raw) / len(deviations), 0.0), MAX_CORRELATION)


def _deviations(values: Sequence[float]) -> list[float]:
    mean = fmean(values)
    return [value - mean for value in values]


def _product(left: Sequence[float], right: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(left, right, strict=True))
