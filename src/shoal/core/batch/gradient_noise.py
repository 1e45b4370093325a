"""The noise of the gradient, learned from the gradients of unequal shares: how large a global batch still pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import frexp, inf, isfinite, ldexp, sqrt

# Half-lives of about 35 steps: long enough to tell a small signal from noise, short enough to follow the training.
MEMORY = 0.98
LEAST_OBSERVATIONS = 10
# The scale counts as known if its error shifts the statistical efficiency (scale + base) / (scale + batch) by less
# than a third; its floor is two standard errors away.
TOLERANCE = 1 / 3
SURE = 2.0
# A gradient so many times as large as usual is an accident, and would drown what is known.
OUTLIER = 32.0
# Squares beyond it are no gradients that are worth a step, and averages of them or of their inverse overflow.
HUGE = 1e140
AVERAGES = ("variance", "signal", "inverse", "size")


@dataclass(frozen=True, slots=True)
class NoiseSample:
    """What one step says: the variance of one sample's gradient, and the squared norm of the true gradient."""

    variance: float
    signal: float


def estimate(shares: Sequence[float], squares: Sequence[float], total_sq: float) -> NoiseSample | None:
    """Unbiased for any two or more shares; `squares` are those of their mean gradients, `total_sq` that of the batch's.

    None if fewer than two shares are not empty, or if a gradient is not finite.
    """
    if len(shares) != len(squares):
        raise ValueError(f"{len(shares)} shares, {len(squares)} squared norms")
    some = [(share, square) for share, square in zip(shares, squares, strict=True) if share != 0]
    if any(share < 0 for share, _ in some):
        return None
    size = sum(share for share, _ in some)
    return estimate_from_sums(sum(share * square for share, square in some), size, len(some), total_sq)


def estimate_from_sums(weighted_sq: float, size: float, groups: int, total_sq: float) -> NoiseSample | None:
    """The same from sums over `groups` of samples: of the shares, and of share times squared mean gradient."""
    if groups < 2 or not (0 < size < inf) or not isfinite(weighted_sq) or not isfinite(total_sq):
        return None
    variance = (weighted_sq - size * total_sq) / (groups - 1)
    signal = total_sq - variance / size
    return NoiseSample(variance, signal) if max(abs(variance), abs(signal)) < HUGE else None


@dataclass(slots=True)
class RunningMean:
    """A running mean that forgets, without the bias of its start, and how sure it is.

    `count` is the sum of the weights of what was seen, `squares` that of their squares, as in any weighted mean.
    """

    total: float = 0.0
    total_sq: float = 0.0
    count: float = 0.0
    squares: float = 0.0

    def add(self, value: float, memory: float = MEMORY, weight: float = 1.0) -> None:
        self.total = memory * self.total + weight * value
        self.total_sq = memory * self.total_sq + weight * value * value
        self.count = memory * self.count + weight
        self.squares = memory * memory * self.squares + weight * weight

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        effective = self.count * self.count / self.squares if self.squares else 0.0
        if effective <= 1.0:
            return inf
        spread = max(0.0, self.total_sq / self.count - self.mean * self.mean)
        return sqrt(spread / (effective - 1.0))


class GradientNoise:
    """The gradient noise of a run, as every member computes it from the same pulses.

    >>> noise = Noise()
    >>> noise.observe(shares=[2, 2], squares=[3.0, 3.0], total_sq=2.0)
    >>> noise.variance, noise.signal
    (4.0, 1.0)
    """

    def __init__(self, memory: float = MEMORY) -> None:
        if not 0.0 < memory < 1.0:
            raise ValueError(f"memory={memory} is not between 0 and 1")
        self._memory = memory
        self._observations = 0
        # Squared norms in units of what is usual; `inverse` turns them back.
        self._variance, self._signal, self._inverse, self._size = (
            RunningMean(),
            RunningMean(),
            RunningMean(),
            RunningMean(),
        )
        self._usual = self._next = 0.0

    def observe(
        self, shares: Sequence[float], squares: Sequence[float], total_sq: float, samples: float | None = None
    ) -> None:
        """Take in one committed step; a step that overflowed or that has one share only says nothing.

        `samples` is the size of the batch if the shares are other weights, such as tokens: the noise scale is then in
        samples all the same. Take the squares from the pulses: they must be the same on all members, bit for bit.
        """
        size, groups = sum(shares), sum(1 for share in shares if share)
        self._take(estimate(shares, squares, total_sq), size, groups, samples)

    def observe_sums(
        self, weighted_sq: float, size: float, groups: int, total_sq: float, samples: float | None = None
    ) -> None:
        """The same from what the pulses carry; see `estimate_from_sums`."""
        self._take(estimate_from_sums(weighted_sq, size, groups, total_sq), size, groups, samples)

    def _take(self, seen: NoiseSample | None, size: float, groups: int, samples: float | None) -> None:
        if seen is None:
            return
        # The mean square of the groups' gradients.
        if not self._as_usual(seen.signal + seen.variance * groups / size):
            return
        samples = size if samples is None else samples
        # What is usual is known from the steps before, so dividing by it leaves both unbiased; and the large gradients
        # of a run's first steps do not outweigh those of today. A step with n groups has n - 1 views of the variance.
        unit = self._usual
        self._variance.add(seen.variance / unit * (samples / size), self._memory, weight=float(groups - 1))
        self._signal.add(seen.signal / unit, self._memory)
        self._inverse.add(1.0 / unit, self._memory)
        self._size.add(samples, self._memory)
        self._observations += 1

    def _as_usual(self, square: float) -> bool:
        """Whether gradients are not far larger than usual; what is usual follows them, by a factor of two a step."""
        if not 1.0 / HUGE < square < HUGE:
            return False
        # Powers of two: dividing by them rounds nothing.
        nearest = ldexp(1.0, frexp(square)[1])
        self._usual = self._next or nearest
        self._next = min(max(nearest, self._usual / 2.0), self._usual * 2.0)
        return square <= OUTLIER * self._usual

    @property
    def observations(self) -> int:
        """How many steps have said something."""
        return self._observations

    @property
    def variance(self) -> float:
        """The variance of one sample's gradient, summed over all parameters: S."""
        return max(0.0, self._variance.mean) / (self._inverse.mean or 1.0)

    @property
    def signal(self) -> float:
        """The squared norm of the true gradient, as far as it can be told from noise: |G|²."""
        return max(0.0, self._signal.mean) / (self._inverse.mean or 1.0)

    @property
    def scale(self) -> float | None:
        """The batch at which noise and signal are equal, S / |G|²; None until it is known well enough."""
        signal, signal_error = self._signal.mean, self._signal.error
        if self._observations < LEAST_OBSERVATIONS or signal <= 0:
            return None
        scale = max(0.0, self._variance.mean) / signal
        error = sqrt((self._variance.error / signal) ** 2 + (scale * signal_error / signal) ** 2)
        return scale if error <= TOLERANCE * (scale + self._size.mean) else None

    @property
    def floor(self) -> float | None:
        """What the noise scale is at least, even with the signal lost in the noise; None until anything is known."""
        if self._observations < LEAST_OBSERVATIONS:
            return None
        signal = max(0.0, self._signal.mean) + SURE * self._signal.error
        variance = self._variance.mean - SURE * self._variance.error
        return variance / signal if variance > 0 and signal > 0 else 0.0

    def state_dict(self) -> dict[str, object]:
        averages = self._variance, self._signal, self._inverse, self._size
        named: dict[str, object] = {name: asdict(one) for name, one in zip(AVERAGES, averages, strict=True)}
        return named | {"observations": self._observations, "usual": self._next}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._observations = int(str(state["observations"]))
        self._next = float(str(state["usual"]))
        self._variance, self._signal, self._inverse, self._size = (_average(state[name]) for name in AVERAGES)


def _average(state: object) -> RunningMean:
    if not isinstance(state, Mapping):
        raise TypeError(f"{state!r} is not the state of an average")
    return RunningMean(**{name: float(value) for name, value in state.items()})
