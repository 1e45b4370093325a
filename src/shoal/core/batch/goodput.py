"""The global batch that trains fastest: throughput times statistical efficiency, and what follows for learning rates.

Only sums, products, quotients and square roots are used: they are the same on every machine, so all members agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf, isfinite, isqrt, sqrt
from typing import Any, Literal

from shoal.core.batch.gradient_noise import GradientNoise
from shoal.core.validation import whole
from shoal.errors import BadSize

Law = Literal["adascale", "sqrt", "off"]
Bounds = tuple[int, int]
StepSeconds = Callable[[int], float]

HALVINGS = 6
LEAST_GAIN = 0.05
# A larger leap would trust the cost models far from where they were measured.
LEAP = 4.0


def law_for(optimizer: str) -> Law:
    """The law that suits an optimizer, by the name of its class: plain gradients, adaptive ones, or neither."""
    name = optimizer.lower()
    if "lbfgs" in name:
        return "off"
    return "adascale" if "sgd" in name or "lars" in name else "sqrt"


def efficiency(size: int, base: int, scale: float) -> float:
    """What a sample is worth in a batch of `size`, where one in a batch of `base` is worth 1."""
    return (scale + base) / (scale + size)


def progress(law: Law, size: int, base: int, scale: float) -> float:
    """How many steps with a batch of `base` one step with `size` stands for; schedules advance by it."""
    return 1.0 if law == "off" or size == base else size / base * efficiency(size, base, scale)


def gain(law: Law, size: int, base: int, scale: float) -> float:
    """What the learning rate that was chosen for a batch of `base` is multiplied by for a batch of `size`."""
    if law == "off" or size == base:
        return 1.0
    # AdaScale's (S/base + |G|²) / (S/size + |G|²), divided by |G|².
    return sqrt(size / base) if law == "sqrt" else progress(law, size, base, scale)


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """The best batch, how much goodput it gains over the present one, and why it was chosen."""

    size: int
    gain: float
    reason: str


def best(
    batch_now: int,
    base: int,
    noise_scale: float,
    step_seconds: StepSeconds,
    bounds: Bounds,
    *,
    multiple: int = 1,
    cost_s: float = 0.0,
    left_s: float = inf,
    least_gain: float = LEAST_GAIN,
    leap: float = LEAP,
) -> BatchChoice:
    """The batch within `bounds` that makes most progress per second; the present one unless that pays.

    A change costs `cost_s` seconds out of the `left_s` in which it could pay. The batch grows or shrinks by a factor of
    `leap` at most, towards the best of all.
    """

    def goodput(size: int) -> float:
        seconds = step_seconds(size)
        if not (isfinite(seconds) and seconds > 0):
            return 0.0
        return size / seconds * efficiency(size, base, noise_scale)

    found = {size: goodput(size) for size in candidates(bounds, multiple)}
    ideal = max(found, key=lambda size: (found[size], -abs(size - batch_now)))
    if not bounds[0] <= batch_now <= bounds[1]:
        return BatchChoice(ideal, 0.0, f"a batch of {batch_now} is not within {bounds[0]}…{bounds[1]}")
    now = goodput(batch_now)
    paid = max(0.0, 1.0 - cost_s / left_s) if left_s > 0 else 0.0
    pays = found[ideal] * paid / now - 1.0 if now else 0.0
    if pays <= least_gain:
        return BatchChoice(batch_now, 0.0, f"no batch gains more than {least_gain:.0%} of goodput: the best is {ideal}")
    low, high = sorted((ideal, batch_now))
    near = [s for s in found if low <= s <= high and s != batch_now and batch_now / leap <= s <= batch_now * leap]
    size = max(near, key=found.__getitem__, default=batch_now)
    if found.get(size, now) <= now:
        return BatchChoice(batch_now, 0.0, f"{ideal} would be better, but what lies between would be worse")
    gained = found[size] / now - 1.0
    return BatchChoice(size, gained, _reason(size, batch_now, gained, step_seconds, noise_scale))


def candidates(bounds: Bounds, multiple: int = 1) -> list[int]:
    """About sixty batches from one bound to the other, each nearly the same factor above the one before."""
    low, high = _rounded(bounds, multiple)
    sizes = {low, high}
    for _ in range(HALVINGS):
        ordered = sorted(sizes)
        middles = (isqrt(a * b) for a, b in pairwise(ordered))
        sizes |= {max(low, middle // multiple * multiple) for middle in middles}
    return sorted(sizes)


def _rounded(bounds: Bounds, multiple: int) -> Bounds:
    low, high = -(-bounds[0] // multiple) * multiple, bounds[1] // multiple * multiple
    if low < 1 or high < low:
        raise BadSize(
            f"no global batch between {bounds[0]} and {bounds[1]} can be chosen",
            why=f"the lower bound must be at least 1, and a multiple of {multiple} must lie between them",
            do='for example batch = "auto:32:1024"',
        )
    return low, high


def _reason(size: int, now: int, gained: float, step_seconds: StepSeconds, scale: float) -> str:
    longer = step_seconds(size) / step_seconds(now)
    return (
        f"goodput +{gained:.0%}: {size} instead of {now} samples take {longer:.2f} x as long a step, "
        f"and the noise scale is {scale:.0f}"
    )


@dataclass(frozen=True, slots=True)
class BatchChange:
    """The global batch from a step on, and why."""

    step: int
    size: int
    reason: str


@dataclass(slots=True)
class _AutoBatchState:
    size: int
    progress: float = 0.0
    looked: int = -1
    streak: int = 0
    probes: int = 0
    scale: float | None = None


class AutoBatch:
    """Chooses the global batch of a run; every member advances its own in the same way, so all of them agree.

    A decision holds `ahead` steps later, so that readers are not surprised. It is made if two looks in a row, `every`
    steps apart, want the batch to change in the same direction.
    """

    def __init__(
        self,
        base: int,
        bounds: Bounds,
        law: Law = "adascale",
        *,
        multiple: int = 1,
        every: int = 10,
        ahead: int = 2,
        patience: int = 2,
        probes: int = 2,
    ) -> None:
        low, high = _rounded(bounds, multiple)
        for name, value in (("base", base), ("every", every), ("ahead", ahead), ("patience", patience)):
            whole(name, value)
        self.base, self.bounds, self.law = base, (low, high), law
        self._multiple, self._every, self._ahead = multiple, every, ahead
        self._patience, self._probes = patience, probes
        self._state = _AutoBatchState(min(max(base, low), high))
        self._pending: BatchChange | None = None

    def size_at(self, step: int) -> int:
        """The global batch of a step, as far as has been decided."""
        pending = self._pending
        return pending.size if pending is not None and step >= pending.step else self._state.size

    def gain_at(self, step: int) -> float:
        """What the learning rate is multiplied by in a step."""
        return gain(self.law, self.size_at(step), self.base, self._state.scale or 0.0)

    @property
    def progress(self) -> float:
        """How many steps with the base batch have been made, in effect."""
        return self._state.progress

    def committed(
        self,
        step: int,
        noise: GradientNoise,
        step_seconds: StepSeconds,
        *,
        sure: bool = True,
        cap: int | None = None,
        cost_s: float = 0.0,
        left_s: float = inf,
    ) -> BatchChange | None:
        """Take note of a committed step; perhaps the batch changes.

        `sure` says whether the cost models have seen more than one size: if not, a change tells them what a step costs
        and what a sample. `cap` is what fits into all members together.
        """
        state = self._state
        state.progress += progress(self.law, self.size_at(step), self.base, state.scale or 0.0)
        if self._pending is not None and step + 1 >= self._pending.step:
            state.size, self._pending = self._pending.size, None
        known = noise.scale
        # Without a signal the noise is at least its floor, and hardly less than when it was last known.
        state.scale = known if known is not None else _larger(state.scale, noise.floor)
        if self._pending is not None or state.scale is None or step - state.looked < self._every:
            return None
        state.looked = step
        if not sure:
            return self._probe(step)
        low, high = self.bounds
        # Micro-batches make the lower bound fit, whatever the cap.
        bounds = (low, high if cap is None else max(low, min(high, cap)))
        choice = best(
            state.size,
            self.base,
            state.scale,
            step_seconds,
            bounds,
            multiple=self._multiple,
            cost_s=cost_s,
            left_s=left_s,
        )
        return self._weigh(step, choice, known is None)

    def _weigh(self, step: int, choice: BatchChoice, unsure: bool) -> BatchChange | None:
        """Act on a choice that has been the same long enough."""
        state = self._state
        way = (choice.size > state.size) - (choice.size < state.size)
        if choice.gain and unsure and way < 0:
            way = 0
        state.streak = 0 if not way else way + (state.streak if state.streak * way > 0 else 0)
        if not way or (choice.gain and abs(state.streak) < self._patience):
            return None
        return self._decide(step, choice.size, choice.reason)

    def _probe(self, step: int) -> BatchChange | None:
        """Try another size, once or twice, to learn what a step costs and what a sample."""
        state = self._state
        if state.probes >= self._probes:
            return None
        low, high = self.bounds
        up = min(high, 2 * state.size // self._multiple * self._multiple)
        down = max(low, -(-state.size // 2 // self._multiple) * self._multiple)
        wanted, other = (up, down) if (state.scale or 0.0) >= state.size else (down, up)
        size = wanted if wanted != state.size else other
        if size == state.size:
            return None
        state.probes += 1
        return self._decide(step, size, f"{size} instead of {state.size} samples show what a step costs by itself")

    def _decide(self, step: int, size: int, reason: str) -> BatchChange:
        self._pending = BatchChange(step + 1 + self._ahead, size, reason)
        self._state.looked = self._pending.step
        return self._pending

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._state) | {"pending": asdict(self._pending) if self._pending is not None else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        values = dict(state)
        pending = values.pop("pending")
        self._state = _AutoBatchState(**values)
        self._pending = BatchChange(**pending) if pending is not None else None


def _larger(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else max(one, other)
