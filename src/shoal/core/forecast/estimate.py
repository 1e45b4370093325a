"""Estimate: an amount that is not known exactly, and the interval in which it lies in most cases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

COVERAGE = 0.9
# Larger relative errors say nothing; they would overflow the interval.
_MAX_RELATIVE_SD = 3.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A positive amount: its expected value, the standard deviation of the error, and the degrees of freedom of that.

    `freedom` is infinite if the standard deviation is known, and small if it comes from few observations.
    """

    value: float
    sd: float = 0.0
    freedom: float = math.inf

    def __add__(self, other: Estimate) -> Estimate:
        """Return the sum of two estimates whose errors are independent (Welch and Satterthwaite)."""
        variance = self.sd**2 + other.sd**2
        weight = self.sd**4 / self.freedom + other.sd**4 / other.freedom
        return Estimate(self.value + other.value, math.sqrt(variance), variance**2 / weight if weight else math.inf)

    def times(self, factor: float) -> Estimate:
        """Return the estimate of a multiple."""
        return Estimate(self.value * factor, self.sd * factor, self.freedom)

    def interval(self, coverage: float = COVERAGE) -> tuple[float, float]:
        """Return the bounds between which the amount lies with this probability."""
        if self.value <= 0.0:
            return 0.0, max(0.0, self.value)
        relative = min(self.sd / self.value, _MAX_RELATIVE_SD)
        width = student_quantile((1.0 + coverage) / 2.0, self.freedom) * math.sqrt(math.log1p(relative**2))
        return self.value * math.exp(-width), self.value * math.exp(min(width, 700.0))


def student_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's distribution by the expansion of Cornish and Fisher; 5 % low at freedom 1."""
    z = NormalDist().inv_cdf(probability)
    if math.isinf(freedom):
        return z
    inverse = 1.0 / max(1.0, freedom)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term * inverse ** (power + 1) for power, term in enumerate(terms))
