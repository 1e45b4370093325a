"""Settings of shares, parsed and validated once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite

from shoal.core.emulation import Emulation, member_number
from shoal.core.nouns import counted
from shoal.core.shares import machines as machine_facts
from shoal.core.shares import split
from shoal.core.shares.machines import KnownMachine
from shoal.errors import BadPlan

POLICIES = ("model", "ratio", "equal", "fixed")
MODES = ("continuous", "epoch", "once")


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """How shares are found, and how readily they change.

    `threshold` is the fraction of a step that a change must save (for `ratio`: the dead band around the mean time).
    `window` is how many steps are measured between changes; the first windows have 2, 4 and 8. `min` and `max` bound
    every share, in samples, or as a fraction of the global batch if below 1 (a `max` of 1 is the whole batch). Either
    gives way when too few members are left for the batch, but no member computes more than a `max` in samples at once:
    larger shares are computed in micro-batches. With a `min` above 0 no member is parked. `mode` is `continuous`,
    `epoch` (change only at the start of an epoch) or `once` (settle, then keep).

    `machines` are the facts that the user declared, `emulation` the machines that members behave like.
    """

    policy: str = "model"
    weights: tuple[float, ...] = ()
    threshold: float = 0.02
    window: int = 10
    min: float = 0.0
    max: float = 1.0
    mode: str = "continuous"
    machines: tuple[KnownMachine, ...] = ()
    emulation: Emulation | None = None

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
        if self.policy == "fixed" and (self.weights or all(machine.share is None for machine in self.machines)):
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
        why = f"in a global batch of {size}, the minimum is {counted(low, 'sample')} and the maximum {high}"
        _check(low <= high, f"shares.min of {self.min:g} is above shares.max of {self.max:g}", why)

    def _bounds(self, size: int) -> tuple[int, int]:
        low = ceil(self.min * size) if self.min < 1 else int(self.min)
        return low, int(self.max * size) if self.max <= 1 else int(self.max)

    def weights_of(self, members: Sequence[str]) -> list[int]:
        """Return the integer weights of members for `equal` and `fixed`: by their names, not by their ranks."""
        if self.policy != "fixed":
            return [1] * len(members)
        by_position = split.FixedShares(self.weights or (1.0,))
        weights = []
        for member, position in zip(members, machine_facts.positions(members), strict=True):
            share = machine_facts.facts_of(member, self.machines).share
            weights.append(share if share is not None else by_position.weight_at(position))
        return split.whole_weights(weights)

    def speeds_of(self, members: Sequence[str]) -> list[float] | None:
        """Return the declared or emulated relative speeds of members, 1 where none is declared; None if no one is."""
        if self.emulation is not None:
            return [self.emulation.machine(member_number(member)).speed for member in members]
        speeds = [machine_facts.facts_of(member, self.machines).speed for member in members]
        return [speed or 1.0 for speed in speeds] if any(speeds) else None

    def most_at_once(self, member: str) -> int | None:
        """Return the most samples that a member may compute at once, None for any number."""
        limits = [int(self.max)] if self.max > 1 else []
        declared = machine_facts.facts_of(member, self.machines).max
        return min([*limits, *([declared] if declared is not None else [])], default=None)


def parse(
    text: str,
    *,
    threshold: float = 0.02,
    window: int = 10,
    min: float = 0.0,
    max: float = 1.0,
    mode: str = "continuous",
    machines: str = "",
    emulation: Emulation | None = None,
) -> ShareSettings:
    """Return the settings; `text` is ``model``, ``ratio``, ``equal``, ``fixed`` or for example ``fixed:3,1``."""
    name, _, rest = text.strip().partition(":")
    weights: tuple[float, ...] = ()
    facts = machine_facts.parse(machines)
    if rest or (name == "fixed" and all(machine.share is None for machine in facts)):
        shares = split.parse(text)
        weights = shares.weights if isinstance(shares, split.FixedShares) else ()
    return ShareSettings(name, weights, threshold, window, min, max, mode, facts, emulation)


def _check_value(name: str, value: float, good: bool, expected: str) -> None:
    _check(good, f"invalid value for shares.{name}: {value}", f"expected {expected}")


def _check(good: bool, what: str, why: str) -> None:
    if not good:
        raise BadPlan(what, why=why, do="for example model, equal or fixed:3,1; shoal config lists all settings")
