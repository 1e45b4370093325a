"""The settings of how a global batch is shared out, read and checked once."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isfinite

from shoal.core.shares import split as shares
from shoal.errors import BadPlan

POLICIES = ("model", "ratio", "equal", "fixed")
MODES = ("continuous", "epoch", "once")


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """How shares are found, and how readily they change.

    `threshold` is the part of a step that a change must save (for `ratio`: the dead band around the mean time).
    `window` is how many steps are measured between changes; the first few come after 2, 4 and 8. `floor` and `cap`
    are samples, or below 1 a part of the global batch (a cap of 1 is the whole of it). A cap in samples is never
    broken; one that is a part gives way when too few members are left for the batch. With a floor nobody is parked.
    `mode` is `continuous`, `epoch` (change at the start of an epoch only) or `once` (settle, then leave it).
    """

    policy: str = "model"
    weights: tuple[float, ...] = ()
    threshold: float = 0.02
    window: int = 10
    min: float = 0.0
    max: float = 1.0
    mode: str = "continuous"

    def __post_init__(self) -> None:
        _check(self.policy in POLICIES, f"{self.policy!r} is not a plan", "the plans are " + ", ".join(POLICIES))
        _check(self.mode in MODES, f"shares.mode cannot be {self.mode!r}", "the modes are " + ", ".join(MODES))
        _check(0 <= self.threshold < 1, f"shares.threshold cannot be {self.threshold}", "it is a part of a step")
        _check(self.window >= 1, f"shares.window cannot be {self.window}", "it is a number of steps, 1 at least")
        _check(self.min >= 0 and isfinite(self.min), f"shares.min cannot be {self.min}", "it is not negative")
        _check(self.max > 0 and isfinite(self.max), f"shares.max cannot be {self.max}", "it is above 0")
        kinds = (self.min < 1, self.max <= 1)
        clash = self.min > self.max and kinds[0] == kinds[1]
        _check(not clash, f"a floor of {self.min:g} is above the cap of {self.max:g}", "nobody could satisfy both")
        if self.policy == "fixed":
            shares.FixedShares(self.weights)

    @property
    def adapts(self) -> bool:
        """Whether shares follow what is measured."""
        return self.policy in ("model", "ratio")

    def bounds(self, size: int, sharing: int) -> tuple[int, int]:
        """The floor and the cap of one share of a global batch of this size, of so many that share it."""
        low = ceil(self.min * size) if self.min < 1 else int(self.min)
        high = max(int(self.max * size), -(-size // max(sharing, 1))) if self.max <= 1 else int(self.max)
        return min(low, high), high

    def check(self, size: int) -> None:
        """Refuse a floor and a cap that contradict each other for this global batch."""
        low = ceil(self.min * size) if self.min < 1 else int(self.min)
        high = int(self.max * size) if self.max <= 1 else int(self.max)
        why = f"of a global batch of {size}, the floor is {low} samples and the cap {high}"
        _check(low <= high, f"a floor of {self.min:g} is above the cap of {self.max:g}", why)

    def declared(self, ranks: int) -> list[int]:
        """The weights of the ranks for `equal` and `fixed`, as whole numbers."""
        return shares.FixedShares(self.weights).whole(ranks) if self.policy == "fixed" else [1] * ranks


def parse(
    text: str,
    *,
    threshold: float = 0.02,
    window: int = 10,
    min: float = 0.0,
    max: float = 1.0,
    mode: str = "continuous",
) -> ShareSettings:
    """The rules from settings; `text` is ``model``, ``ratio``, ``equal`` or for example ``fixed:3,1``."""
    name, _, rest = text.strip().partition(":")
    weights: tuple[float, ...] = ()
    if name == "fixed" or rest:
        declared = shares.parse(text)
        weights = declared.weights if isinstance(declared, shares.FixedShares) else ()
    return ShareSettings(name, weights, threshold, window, min, max, mode)


def _check(good: bool, what: str, why: str) -> None:
    if not good:
        raise BadPlan(what, why=why, do="for example model, equal or fixed:3,1; shoal config prints all settings")
