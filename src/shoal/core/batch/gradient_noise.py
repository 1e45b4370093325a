"""Gradient noise scale, estimated from the gradients of unequal shares; see the formulas of the folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import frexp, inf, isfinite, ldexp, sqrt

# Half-lives of about 35 steps: long enough to tell a small signal from noise, short enough to follow the training.
MEMORY = 0.98
MIN_OBSERVATIONS = 10
# The scale counts as known if its error shifts the statistical efficiency (scale + base) / (scale + batch) by less
# than a third; its floor is two standard errors away.
TOLERANCE = 1 / 3
FLOOR_ERRORS = 2.0
# A squared norm this many times the typical one is an outlier that would outweigh all others.
OUTLIER = 32.0
# Squared norms beyond this are no useful gradients, and averages of them or of their inverse would overflow.
HUGE = 1e140
AVERAGES = ("variance", "signal", "inverse", "size")


@dataclass(frozen=True, slots=True)
class NoiseSample:
    """Estimates from one step: the variance of one sample's gradient, and the squared norm of the true gradient."""

    variance: float
    signal: float


def estimate(shares: Sequence[float], squares: Sequence[float], total_sq: float) -> NoiseSample | None:
    """Return unbiased estimates from two or more shares of any size.

    `squares` are the squared norms of their mean gradients, `total_sq` that of the batch gradient. Returns None if
    fewer than two shares are not empty, or if a gradient is not finite.
    """
    if len(shares) != len(squares):
        raise ValueError(f"{len(shares)} shares, {len(squares)} squared norms")
    used = [(share, square) for share, square in zip(shares, squares, strict=True) if share != 0]
    if any(share < 0 for share, _ in used):
        return None
    size = sum(share for share, _ in used)
    return estimate_from_sums(sum(share * square for share, square in used), size, len(used), total_sq)


def estimate_from_sums(weighted_sq: float, size: float, groups: int, total_sq: float) -> NoiseSample | None:
    """Return the same from sums over `groups` of samples: of the shares, and of share times squared mean gradient."""
    if groups < 2 or not (0 < size < inf) or not isfinite(weighted_sq) or not isfinite(total_sq):
        return None
    variance = (weighted_sq - size * total_sq) / (groups - 1)
    signal = total_sq - variance / size
    return NoiseSample(variance, signal) if max(abs(variance), abs(signal)) < HUGE else None


@dataclass(slots=True)
class RunningMean:
    """Exponentially weighted mean without the bias of its start, with its standard error.

    `count` is the sum of the weights, `squares` the sum of their squares.
    """

    total: float = 0.0
    total_sq: float = 0.0
    count: float = 0.0
    squares: float = 0.0

    def add(self, value: float, memory: float = MEMORY, weight: float = 1.0) -> None:
        """Add a value; all earlier weights are multiplied by `memory`."""
        self.total = memory * self.total + weight * value
        self.total_sq = memory * self.total_sq + weight * value * value
        self.count = memory * self.count + weight
        self.squares = memory * memory * self.squares + weight * weight

    @property
    def mean(self) -> float:
        """The mean, 0 before any value."""
        return self.total / self.count if self.count else 0.0

    @property
    def error(self) -> float:
        """The standard error of the mean; infinite with fewer than two effective values."""
        effective = self.count * self.count / self.squares if self.squares else 0.0
        if effective <= 1.0:
            return inf
        spread = max(0.0, self.total_sq / self.count - self.mean * self.mean)
        return sqrt(spread / (effective - 1.0))


class GradientNoise:
    """Gradient noise of a run, as every member computes it from the same step reports.

    >>> noise = GradientNoise()
    >>> noise.observe(shares=[2, 2], squares=[3.0, 3.0], total_sq=2.0)
    >>> noise.variance, noise.signal
    (4.0, 1.0)
    """

    def __init__(self, memory: float = MEMORY) -> None:
        if not 0.0 < memory < 1.0:
            raise ValueError(f"invalid memory {memory} — expected 0 < memory < 1")
        self._memory = memory
        self._observations = 0
        # Squared norms are averaged in units of the typical one; `inverse` converts them back.
        self._variance, self._signal, self._inverse, self._size = (
            RunningMean(),
            RunningMean(),
            RunningMean(),
            RunningMean(),
        )
        self._typical = self._next_typical = 0.0

    def observe(
        self, shares: Sequence[float], squares: Sequence[float], total_sq: float, samples: float | None = None
    ) -> None:
        """Add one committed step; a step that overflowed or has a single share is ignored.

        `samples` is the size of the batch if the shares are other weights, such as tokens; the noise scale is in
        samples all the same. The squares must be those of the step reports: equal on all members, bit for bit.
        """
        size, groups = sum(shares), sum(1 for share in shares if share)
        self._add(estimate(shares, squares, total_sq), size, groups, samples)

    def observe_sums(
        self, weighted_sq: float, size: float, groups: int, total_sq: float, samples: float | None = None
    ) -> None:
        """Add one committed step by the sums that step reports carry; see `estimate_from_sums`."""
        self._add(estimate_from_sums(weighted_sq, size, groups, total_sq), size, groups, samples)

    def _add(self, sample: NoiseSample | None, size: float, groups: int, samples: float | None) -> None:
        if sample is None:
            return
        # The mean square of the groups' gradients.
        if not self._is_typical(sample.signal + sample.variance * groups / size):
            return
        samples = size if samples is None else samples
        # The typical norm comes from the steps before, so dividing by it leaves both unbiased, and the large gradients
        # of the first steps do not outweigh recent ones. A step with n groups has n - 1 degrees of freedom.
        unit = self._typical
        self._variance.add(sample.variance / unit * (samples / size), self._memory, weight=float(groups - 1))
        self._signal.add(sample.signal / unit, self._memory)
        self._inverse.add(1.0 / unit, self._memory)
        self._size.add(samples, self._memory)
        self._observations += 1

    def _is_typical(self, square: float) -> bool:
        """Return whether gradients are not far larger than typical; the typical norm follows by at most 2x per step."""
        if not 1.0 / HUGE < square < HUGE:
            return False
        # Division by a power of two is exact.
        nearest = ldexp(1.0, frexp(square)[1])
        self._typical = self._next_typical or nearest
        self._next_typical = min(max(nearest, self._typical / 2.0), self._typical * 2.0)
        return square <= OUTLIER * self._typical

    @property
    def observations(self) -> int:
        """Number of steps that were used."""
        return self._observations

    @property
    def variance(self) -> float:
        """The variance of one sample's gradient, summed over all parameters: S."""
        return max(0.0, self._variance.mean) / (self._inverse.mean or 1.0)

    @property
    def signal(self) -> float:
        """The squared norm of the true gradient: |G|²; 0 if it is lost in the noise."""
        return max(0.0, self._signal.mean) / (self._inverse.mean or 1.0)

    @property
    def scale(self) -> float | None:
        """The noise scale S/|G|², the batch at which noise and signal are equal; None until known well enough."""
        signal, signal_error = self._signal.mean, self._signal.error
        if self._observations < MIN_OBSERVATIONS or signal <= 0:
            return None
        scale = max(0.0, self._variance.mean) / signal
        error = sqrt((self._variance.error / signal) ** 2 + (scale * signal_error / signal) ** 2)
        return scale if error <= TOLERANCE * (scale + self._size.mean) else None

    @property
    def floor(self) -> float | None:
        """A lower bound of the noise scale, valid even if the signal is lost in the noise; None before enough steps."""
        if self._observations < MIN_OBSERVATIONS:
            return None
        signal = max(0.0, self._signal.mean) + FLOOR_ERRORS * self._signal.error
        variance = self._variance.mean - FLOOR_ERRORS * self._variance.error
        return variance / signal if variance > 0 and signal > 0 else 0.0

    def state_dict(self) -> dict[str, object]:
        """Return plain values for a snapshot."""
        averages = self._variance, self._signal, self._inverse, self._size
        named: dict[str, object] = {name: asdict(average) for name, average in zip(AVERAGES, averages, strict=True)}
        return named | {"observations": self._observations, "typical": self._next_typical}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what `state_dict` returned."""
        self._observations = int(str(state["observations"]))
        self._next_typical = float(str(state["typical"]))
        self._variance, self._signal, self._inverse, self._size = (_average(state[name]) for name in AVERAGES)


def _average(state: object) -> RunningMean:
    if not isinstance(state, Mapping):
        raise TypeError(f"invalid state of a running mean: {state!r}")
    return RunningMean(**{name: float(value) for name, value in state.items()})
