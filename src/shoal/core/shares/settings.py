"""Settings of shares, parsed and validated once."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isfinite

from shoal.core.shares import split
from shoal.errors import BadPlan

POLICIES = ("model", "ratio", "equal", "fixed")
MODES = ("continuous", "epoch", "once")


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """How shares are found, and how readily they change.

    `threshold` is the fraction of a step that a change must save (for `ratio`: the dead band around the mean time).
    `window` is how many steps are measured between changes; the first windows have 2, 4 and 8. `min` and `max` bound
    every share, in samples, or as a fraction of the global batch if below 1 (a `max` of 1 is the whole batch). A `max`
    in samples always holds; as a fraction it gives way when too few members are left for the batch. With a `min` above
    0 no member is parked. `mode` is `continuous`, `epoch` (change only at the start of an epoch) or `once` (settle,
    then keep).
    """

    policy: str = "model"
    weights: tuple[float, ...] = ()
    threshold: float = 0.02
    window: int = 10
    min: float = 0.0
    max: float = 1.0
    mode: str = "continuous"

    def __post_init__(self) -> None:
        _check(self.policy in POLICIES, f"unknown share policy {self.policy!r}", "expected " + ", ".join(POLICIES))
        _check(self.mode in MODES, f"invalid value for shares.mode: {self.mode!r}", "expected " + ", ".join(MODES))
        _check_value("threshold", self.threshold, 0 <= self.threshold < 1, "0 ≤ fraction of a step < 1")
        _check_value("window", self.window, self.window >= 1, "a number of steps ≥ 1")
        _check_value("min", self.min, self.min >= 0 and isfinite(self.min), "a number ≥ 0")
        _check_value("max", self.max, self.max > 0 and isfinite(self.max), "a number > 0")
        same_unit = (self.min < 1) == (self.max <= 1)
        clash = self.min > self.max and same_unit
        _check(not clash, f"shares.min of {self.min:g} is above shares.max of {self.max:g}", "no share satisfies both")
        if self.policy == "fixed":
            split.FixedShares(self.weights)

    @property
    def adapts(self) -> bool:
        """Whether shares follow measurements."""
        return self.policy in ("model", "ratio")

    def bounds(self, size: int, members: int) -> tuple[int, int]:
        """Return the least and the largest share of a global batch that so many members divide."""
        low, high = self._bounds(size)
        if self.max <= 1:
            high = max(high, -(-size // max(members, 1)))
        return min(low, high), high

    def check(self, size: int) -> None:
        """Raise `BadPlan` if min and max contradict each other for a global batch of this size."""
        low, high = self._bounds(size)
        why = f"in a global batch of {size}, the minimum is {low} samples and the maximum {high}"
        _check(low <= high, f"shares.min of {self.min:g} is above shares.max of {self.max:g}", why)

    def _bounds(self, size: int) -> tuple[int, int]:
        low = ceil(self.min * size) if self.min < 1 else int(self.min)
        return low, int(self.max * size) if self.max <= 1 else int(self.max)

    def declared(self, ranks: int) -> list[int]:
        """Return the integer weights of the ranks for `equal` and `fixed`."""
        return split.FixedShares(self.weights).whole(ranks) if self.policy == "fixed" else [1] * ranks


def parse(
    text: str,
    *,
    threshold: float = 0.02,
    window: int = 10,
    min: float = 0.0,
    max: float = 1.0,
    mode: str = "continuous",
) -> ShareSettings:
    """Return the settings; `text` is ``model``, ``ratio``, ``equal`` or for example ``fixed:3,1``."""
    name, _, rest = text.strip().partition(":")
    weights: tuple[float, ...] = ()
    if name == "fixed" or rest:
        shares = split.parse(text)
        weights = shares.weights if isinstance(shares, split.FixedShares) else ()
    return ShareSettings(name, weights, threshold, window, min, max, mode)


def _check_value(name: str, value: float, good: bool, expected: str) -> None:
    _check(good, f"invalid value for shares.{name}: {value}", f"expected {expected}")


def _check(good: bool, what: str, why: str) -> None:
    if not good:
        raise BadPlan(what, why=why, do="for example model, equal or fixed:3,1; shoal config lists all settings")
