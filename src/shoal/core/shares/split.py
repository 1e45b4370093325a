"""Split a global batch over the members of a world: the shares, in rank order, always sum to the batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heapreplace
from itertools import accumulate
from math import lcm
from typing import Protocol

from shoal.errors import BadPlan

Shares = tuple[int, ...]


class SharePolicy(Protocol):
    """How a global batch is shared out; pure, so that all members compute the same shares without asking anyone."""

    def shares(self, size: int, ranks: int, ghosts: Collection[int] = ()) -> Shares:
        """One share for each rank, summing to `size`; ghosts get none."""
        ...


@dataclass(frozen=True, slots=True)
class EqualShares:
    """Everyone gets the same; the first ranks take what is left over."""

    def shares(self, size: int, ranks: int, ghosts: Collection[int] = ()) -> Shares:
        return split(size, _without([1] * ranks, ghosts))


@dataclass(frozen=True, slots=True)
class FixedShares:
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
        weights = _without(self.whole(ranks), ghosts)
        # Those with a weight may all be ghosts or gone; the batch must be computed by somebody all the same.
        return split(size, weights) if any(weights) else EqualShares().shares(size, ranks, ghosts)

    def whole(self, ranks: int) -> list[int]:
        """The weights of so many ranks, scaled to whole numbers without rounding."""
        exact = [Fraction(weight) for weight in self.weights]
        scale = lcm(*(weight.denominator for weight in exact))
        return [int(exact[min(rank, len(exact) - 1)] * scale) for rank in range(ranks)]


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


# Shares are quite different if one of them differs by more than this part of an equal share.
FAR = 4


class CostModel(Protocol):
    """How long a member takes, never falling with its share."""

    def seconds(self, samples: int) -> float:
        """The seconds that a share of so many samples takes."""
        ...

    def reach(self, seconds: float, most: int) -> int:
        """About as many samples as fit into so many seconds, `most` at most."""
        ...


def by_cost(size: int, costs: Sequence[CostModel], lows: Sequence[int], highs: Sequence[int]) -> Shares:
    """The shares with which the last to finish finishes first: the sum is exact, and no share above its cap.

    Floors hold if the batch is large enough for all of them; if not, it is cut in proportion to the floors.
    """
    _feasible(size, lows, highs)
    if sum(lows) >= size:
        return split(size, lows) if size else (0,) * len(lows)
    shares = _all_done_at(_latest_start(size, costs, lows, highs), costs, lows, highs)
    return _handed_out(size - sum(shares), shares, costs, highs)


def prefer_even(
    size: int, costs: Sequence[CostModel], lows: Sequence[int], highs: Sequence[int], slower: float
) -> Shares:
    """The fastest shares, or the most even ones if they are quite different and take at most this part longer.

    Where a step costs much the same whoever gets how much of it, noise would otherwise decide.
    """
    found = by_cost(size, costs, lows, highs)
    if sum(lows) >= size:
        return found
    within_s = max(cost.seconds(share) for cost, share in zip(costs, found, strict=True)) * (1 + slower)
    reached = [max(had, cost.reach(within_s, high)) for had, cost, high in zip(found, costs, highs, strict=True)]
    even = by_weight(size, [1] * len(costs), lows, reached)
    far = max(abs(had - share) for had, share in zip(found, even, strict=True))
    return even if far * FAR * len(costs) > size else found


def by_weight(size: int, weights: Sequence[int], lows: Sequence[int], highs: Sequence[int]) -> Shares:
    """Cut `size` in proportion to weights where caps and floors allow it; what they forbid goes to the others alike."""
    _feasible(size, lows, highs)
    if sum(lows) >= size:
        return split(size, lows) if size else (0,) * len(lows)
    held: dict[int, int] = {}
    while True:
        free = [0 if rank in held else weight for rank, weight in enumerate(weights)]
        if not any(free):
            free = [0 if rank in held else 1 for rank in range(len(weights))]
        cut = split(size - sum(held.values()), free) if any(free) else (0,) * len(weights)
        shares = [held.get(rank, share) for rank, share in enumerate(cut)]
        over = sum(max(share - high, 0) for share, high in zip(shares, highs, strict=True))
        under = sum(max(low - share, 0) for share, low in zip(shares, lows, strict=True))
        if not over and not under:
            return tuple(shares)
        # Holding only the side that is more in the wrong keeps the rest feasible, as in any water-filling.
        for rank, share in enumerate(shares):
            if over >= under and share > highs[rank]:
                held[rank] = highs[rank]
            elif over < under and share < lows[rank]:
                held[rank] = lows[rank]


def without_singles(shares: Sequence[int], highs: Sequence[int]) -> Shares:
    """The same shares without a single sample anywhere, as far as the caps allow: it goes along with the largest share.

    >>> without_singles((1, 5, 1), (8, 6, 8)), without_singles((1, 5), (8, 5))
    ((0, 5, 2), (2, 4))
    """
    found = list(shares)
    for rank in [rank for rank, share in enumerate(shares) if share == 1]:
        if found[rank] != 1:
            continue
        others = sorted((-share, other) for other, share in enumerate(found) if share and other != rank)
        room = next((other for negative, other in others if -negative < highs[other]), None)
        if room is not None:
            found[rank] = 0
            found[room] += 1
        elif others and -others[0][0] > 3 and highs[rank] > 1:
            found[rank] = 2
            found[others[0][1]] -= 1
    return tuple(found)


def _feasible(size: int, lows: Sequence[int], highs: Sequence[int]) -> None:
    for rank, (low, high) in enumerate(zip(lows, highs, strict=True)):
        if low > high:
            raise BadPlan(
                f"rank {rank} must take {low} samples at least and {high} at most",
                why="its floor is above its cap",
                do="lower the floor or raise the cap",
            )
    if sum(highs) < size:
        raise BadPlan(
            f"a global batch of {size} does not fit",
            why=f"the caps of the members ({', '.join(map(str, highs))}) allow {sum(highs)} samples",
            do="raise the caps, add members, or take a smaller global batch",
        )


def _all_done_at(seconds: float, costs: Sequence[CostModel], lows: Sequence[int], highs: Sequence[int]) -> list[int]:
    return [max(low, cost.reach(seconds, high)) for cost, low, high in zip(costs, lows, highs, strict=True)]


def _latest_start(size: int, costs: Sequence[CostModel], lows: Sequence[int], highs: Sequence[int]) -> float:
    """By bisection, about the longest time in which the members do not get more than the batch done."""
    early = 0.0
    late = max(cost.seconds(min(size, high)) for cost, high in zip(costs, highs, strict=True))
    for _ in range(40):
        middle = early + (late - early) / 2
        rest = size - sum(_all_done_at(middle, costs, lows, highs))
        if rest >= 0:
            early = middle
        else:
            late = middle
        # A few samples are sooner handed out one by one than found by halving on.
        if 0 <= rest <= len(costs) or late - early <= 1e-9 * late:
            break
    return early


def _handed_out(rest: int, shares: list[int], costs: Sequence[CostModel], highs: Sequence[int]) -> Shares:
    """Give what is left, one by one, to whoever would finish it first; ties go to the first rank."""
    queue = [(cost.seconds(share + 1), rank) for rank, (cost, share) in enumerate(zip(costs, shares, strict=True))]
    queue = [(seconds, rank) for seconds, rank in queue if shares[rank] < highs[rank]]
    heapify(queue)
    for _ in range(rest):
        rank = queue[0][1]
        shares[rank] += 1
        after = costs[rank].seconds(shares[rank] + 1) if shares[rank] < highs[rank] else float("inf")
        heapreplace(queue, (after, rank))
    return tuple(shares)


def span(shares: Sequence[int], rank: int) -> tuple[int, int]:
    """The slice (start, stop) of the global batch that belongs to `rank`."""
    ends = list(accumulate(shares, initial=0))
    return ends[rank], ends[rank + 1]


def parse(text: str) -> SharePolicy:
    """A policy from a setting: ``equal`` or ``fixed:3,1``."""
    name, _, rest = text.strip().partition(":")
    if name == "equal" and not rest:
        return EqualShares()
    if name == "fixed":
        try:
            weights = tuple(float(part) for part in rest.split(","))
        except ValueError as error:
            raise BadPlan(f"{text!r} is not a plan", why=str(error), do="for example fixed:3,1") from error
        return FixedShares(weights)
    raise BadPlan(
        f"{text!r} is not a plan", why="the plans are equal and fixed", do="pass equal, or for example fixed:3,1"
    )


def _without(weights: list[int], ghosts: Collection[int]) -> list[int]:
    return [0 if rank in ghosts else weight for rank, weight in enumerate(weights)]
