"""Split a global batch over the members of a world: the shares, in rank order, always sum to the batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import Protocol

from shoal.errors import BadPlan

Shares = tuple[int, ...]


class Policy(Protocol):
    """How a global batch is shared out; pure, so that all members compute the same shares without asking anyone."""

    def shares(self, size: int, ranks: int, ghosts: Collection[int] = ()) -> Shares:
        """One share for each rank, summing to `size`; ghosts get none."""
        ...


@dataclass(frozen=True, slots=True)
class Equal:
    """Everyone gets the same; the first ranks take what is left over."""

    def shares(self, size: int, ranks: int, ghosts: Collection[int] = ()) -> Shares:
        return split(size, _without([1] * ranks, ghosts))


@dataclass(frozen=True, slots=True)
class Fixed:
    """Rank r gets a share in proportion to weight r; ranks beyond the list count as the last one."""

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.weights or not all(0 <= weight < float("inf") for weight in self.weights) or not any(self.weights):
            raise BadPlan(
                f"fixed shares with weights {', '.join(map(str, self.weights)) or '(none)'}",
                why="weights are finite, not negative, and not all zero",
                do="for example fixed:3,1",
            )

    def shares(self, size: int, ranks: int, ghosts: Collection[int] = ()) -> Shares:
        exact = [Fraction(weight) for weight in self.weights]
        scale = lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * scale) for weight in exact]
        weights = _without([whole[min(rank, len(whole) - 1)] for rank in range(ranks)], ghosts)
        # Those with a weight may all be ghosts or gone; the batch must be computed by somebody all the same.
        return split(size, weights) if any(weights) else Equal().shares(size, ranks, ghosts)


def split(size: int, weights: Sequence[int]) -> Shares:
    """Cut `size` in proportion to whole-number weights by the largest remainder, exactly; ties go to the first."""
    total = sum(weights)
    if size < 0 or total <= 0:
        raise ValueError(f"cannot split {size} by weights {list(weights)}")
    parts = [size * weight // total for weight in weights]
    neediest = sorted(range(len(weights)), key=lambda rank: (-(size * weights[rank] % total), rank))
    for rank in neediest[: size - sum(parts)]:
        parts[rank] += 1
    return tuple(parts)


def span(shares: Sequence[int], rank: int) -> tuple[int, int]:
    """The slice (start, stop) of the global batch that belongs to `rank`."""
    ends = list(accumulate(shares, initial=0))
    return ends[rank], ends[rank + 1]


def parse(text: str) -> Policy:
    """A policy from a setting: ``equal`` or ``fixed:3,1``."""
    name, _, rest = text.strip().partition(":")
    if name == "equal" and not rest:
        return Equal()
    if name == "fixed":
        try:
            weights = tuple(float(part) for part in rest.split(","))
        except ValueError as error:
            raise BadPlan(f"{text!r} is not a plan", why=str(error), do="for example fixed:3,1") from error
        return Fixed(weights)
    raise BadPlan(
        f"{text!r} is not a plan", why="the plans are equal and fixed", do="pass equal, or for example fixed:3,1"
    )


def _without(weights: list[int], ghosts: Collection[int]) -> list[int]:
    return [0 if rank in ghosts else weight for rank, weight in enumerate(weights)]
