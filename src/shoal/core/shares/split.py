"""Splits of a global batch: the shares of all members, in rank order, always sum to the batch.

`split` is exact proportional division. `by_cost` finds the shares with which the slowest member finishes first;
`by_weight` follows given weights; both respect bounds. All are deterministic, so every member computes the same shares
without exchanging them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heapreplace
from itertools import accumulate
from math import lcm
from typing import Protocol

from shoal.core.nouns import counted
from shoal.errors import BadPlan

Shares = tuple[int, ...]

# `prefer_even` acts if some share differs by more than 1/UNEVEN of an equal share.
UNEVEN = 4
BISECTION_STEPS = 40


@dataclass(frozen=True, slots=True)
class EqualShares:
    """The same share for every rank; the first ranks take the remainder."""

    def shares(self, size: int, ranks: int, catching_up: Collection[int] = ()) -> Shares:
        """Return one share for each rank, summing to `size`; ranks that are catching up get none."""
        return split(size, _without([1] * ranks, catching_up))


@dataclass(frozen=True, slots=True)
class FixedShares:
    """Shares in proportion to given weights; positions beyond the list count as the last one."""

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.weights or not all(0 <= weight < float("inf") for weight in self.weights) or not any(self.weights):
            raise BadPlan(
                f"invalid weights for fixed shares: {', '.join(map(str, self.weights)) or '(none)'}",
                why="weights must be finite, not negative, and not all zero",
                do="for example fixed:3,1",
            )

    def shares(self, size: int, ranks: int, catching_up: Collection[int] = ()) -> Shares:
        """Return one share for each rank, summing to `size`; ranks that are catching up get none."""
        weights = _without(whole_weights([self.weight_at(rank) for rank in range(ranks)]), catching_up)
        # All members with a weight may be catching up or gone; the batch must be computed all the same.
        return split(size, weights) if any(weights) else EqualShares().shares(size, ranks, catching_up)

    def weight_at(self, position: int) -> float:
        """Return the weight at a position of the list; beyond its end, the last one."""
        return self.weights[min(position, len(self.weights) - 1)]


StaticShares = EqualShares | FixedShares


def parse(text: str) -> StaticShares:
    """Return the shares that a setting names: ``equal`` or for example ``fixed:3,1``."""
    name, _, rest = text.strip().partition(":")
    if name == "equal" and not rest:
        return EqualShares()
    if name == "fixed":
        try:
            weights = tuple(float(part) for part in rest.split(","))
        except ValueError as error:
            raise BadPlan(f"invalid share policy {text!r}", why=str(error), do="for example fixed:3,1") from error
        return FixedShares(weights)
    raise BadPlan(
        f"invalid share policy {text!r}",
        why="expected equal or fixed:WEIGHTS",
        do="pass equal, or for example fixed:3,1",
    )


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return weights scaled to integers without rounding."""
    exact = [Fraction(weight) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    return [int(weight * scale) for weight in exact]


def split(size: int, weights: Sequence[int]) -> Shares:
    """Divide `size` in proportion to integer weights by the largest remainder; ties go to the first.

    >>> split(10, (1, 1, 1))
    (4, 3, 3)
    """
    total = sum(weights)
    if size < 0 or total <= 0:
        raise ValueError(f"cannot split {size} by weights {list(weights)}")
    parts = [size * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (-(size * weights[rank] % total), rank))
    for rank in by_remainder[: size - sum(parts)]:
        parts[rank] += 1
    return tuple(parts)


def span(shares: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the slice (start, stop) of the global batch that belongs to `rank`."""
    ends = list(accumulate(shares, initial=0))
    return ends[rank], ends[rank + 1]


# --- by cost


class CostModel(Protocol):
    """Seconds that a member takes, never decreasing with its share."""

    def seconds(self, samples: int) -> float:
        """Return the seconds that a share of so many samples takes."""
        ...

    def samples_within(self, seconds: float, most: int) -> int:
        """Return about how many samples fit into so many seconds, at most `most`."""
        ...


def by_cost(size: int, costs: Sequence[CostModel], lows: Sequence[int], highs: Sequence[int]) -> Shares:
    """Return the shares with which the slowest member finishes first, within bounds.

    Bisection finds the longest time T in which the members, each with as many samples as fit into T, do not exceed the
    batch; the few samples that are left go one by one to the member that would finish them first. Upper bounds always
    hold. If the batch is too small for all lower bounds, it is divided in proportion to them.
    """
    _check_bounds(size, lows, highs)
    if sum(lows) >= size:
        return split(size, lows) if size else (0,) * len(lows)
    shares = _done_within(_latest_time(size, costs, lows, highs), costs, lows, highs)
    return _hand_out(size - sum(shares), shares, costs, highs)


def prefer_even(
    size: int, costs: Sequence[CostModel], lows: Sequence[int], highs: Sequence[int], slower: float
) -> Shares:
    """Return the fastest shares, or the most even ones if they differ a lot and are slower by at most this part.

    Where a step takes much the same time whichever member computes it, noise would otherwise decide.
    """
    fastest = by_cost(size, costs, lows, highs)
    if sum(lows) >= size:
        return fastest
    limit_s = max(cost.seconds(share) for cost, share in zip(costs, fastest, strict=True)) * (1 + slower)
    reachable = [
        max(share, cost.samples_within(limit_s, high)) for share, cost, high in zip(fastest, costs, highs, strict=True)
    ]
    even = by_weight(size, [1] * len(costs), lows, reachable)
    difference = max(abs(share - other) for share, other in zip(fastest, even, strict=True))
    return even if difference * UNEVEN * len(costs) > size else fastest


def _done_within(seconds: float, costs: Sequence[CostModel], lows: Sequence[int], highs: Sequence[int]) -> list[int]:
    return [max(low, cost.samples_within(seconds, high)) for cost, low, high in zip(costs, lows, highs, strict=True)]


def _latest_time(size: int, costs: Sequence[CostModel], lows: Sequence[int], highs: Sequence[int]) -> float:
    """Return, by bisection, about the longest time in which the members do not exceed the batch."""
    early = 0.0
    late = max(cost.seconds(min(size, high)) for cost, high in zip(costs, highs, strict=True))
    for _ in range(BISECTION_STEPS):
        middle = early + (late - early) / 2
        rest = size - sum(_done_within(middle, costs, lows, highs))
        if rest >= 0:
            early = middle
        else:
            late = middle
        # Handing out a few samples one by one is cheaper than halving further.
        if 0 <= rest <= len(costs) or late - early <= 1e-9 * late:
            break
    return early


def _hand_out(rest: int, shares: list[int], costs: Sequence[CostModel], highs: Sequence[int]) -> Shares:
    """Give the remaining samples, one by one, to the member that would finish first; ties go to the first rank."""
    queue = [(cost.seconds(share + 1), rank) for rank, (cost, share) in enumerate(zip(costs, shares, strict=True))]
    queue = [(seconds, rank) for seconds, rank in queue if shares[rank] < highs[rank]]
    heapify(queue)
    for _ in range(rest):
        rank = queue[0][1]
        shares[rank] += 1
        after = costs[rank].seconds(shares[rank] + 1) if shares[rank] < highs[rank] else float("inf")
        heapreplace(queue, (after, rank))
    return tuple(shares)


# --- by weight


def by_weight(size: int, weights: Sequence[int], lows: Sequence[int], highs: Sequence[int]) -> Shares:
    """Divide `size` in proportion to weights within bounds; what the bounds forbid goes to the others evenly."""
    _check_bounds(size, lows, highs)
    if sum(lows) >= size:
        return split(size, lows) if size else (0,) * len(lows)
    pinned: dict[int, int] = {}
    while True:
        free = [0 if rank in pinned else weight for rank, weight in enumerate(weights)]
        if not any(free):
            free = [0 if rank in pinned else 1 for rank in range(len(weights))]
        parts = split(size - sum(pinned.values()), free) if any(free) else (0,) * len(weights)
        shares = [pinned.get(rank, share) for rank, share in enumerate(parts)]
        over = sum(max(share - high, 0) for share, high in zip(shares, highs, strict=True))
        under = sum(max(low - share, 0) for share, low in zip(shares, lows, strict=True))
        if not over and not under:
            return tuple(shares)
        # Pinning only the side that is violated more keeps the rest feasible, as in any water-filling.
        for rank, share in enumerate(shares):
            if over >= under and share > highs[rank]:
                pinned[rank] = highs[rank]
            elif over < under and share < lows[rank]:
                pinned[rank] = lows[rank]


def without_singles(shares: Sequence[int], highs: Sequence[int]) -> Shares:
    """Return the same shares with no share of one sample, as far as the bounds allow; it joins the largest share.

    Batch normalisation cannot train on a single sample.

    >>> without_singles((1, 5, 1), (8, 6, 8)), without_singles((1, 5), (8, 5))
    ((0, 5, 2), (2, 4))
    """
    result = list(shares)
    for rank in [rank for rank, share in enumerate(shares) if share == 1]:
        if result[rank] != 1:
            continue
        others = sorted((-share, other) for other, share in enumerate(result) if share and other != rank)
        room = next((other for negative, other in others if -negative < highs[other]), None)
        if room is not None:
            result[rank] = 0
            result[room] += 1
        elif others and -others[0][0] > 3 and highs[rank] > 1:
            result[rank] = 2
            result[others[0][1]] -= 1
    return tuple(result)


def _check_bounds(size: int, lows: Sequence[int], highs: Sequence[int]) -> None:
    for rank, (low, high) in enumerate(zip(lows, highs, strict=True)):
        if low > high:
            raise BadPlan(
                f"rank {rank} must compute at least {low} and at most {counted(high, 'sample')}",
                why="its lower bound is above its upper bound",
                do="lower shares.min or raise shares.max",
            )
    if sum(highs) < size:
        raise BadPlan(
            f"a global batch of {size} does not fit",
            why=f"the upper bounds of the members ({', '.join(map(str, highs))}) allow {counted(sum(highs), 'sample')}",
            do="raise shares.max, add members, or use a smaller global batch",
        )


def _without(weights: list[int], catching_up: Collection[int]) -> list[int]:
    return [0 if rank in catching_up else weight for rank, weight in enumerate(weights)]
