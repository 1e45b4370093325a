"""x"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from shoal.core.batch.goodput import BatchChoice, Bounds, LrScaling, StepSeconds, best, lr_gain, progress, round_bounds
from shoal.core.batch.gradient_noise import GradientNoise
from shoal.core.validation import checked_int


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
        law: LrScaling = "adascale",
        *,
        multiple: int = 1,
        every: int = 10,
        ahead: int = 2,
        patience: int = 2,
        probes: int = 2,
    ) -> None:
        low, high = round_bounds(bounds, multiple)
        for name, value in (("base", base), ("every", every), ("ahead", ahead), ("patience", patience)):
            checked_int(name, value)
        self.base, self.bounds, self.law = base, (low, high), law
        self._multiple, self._every, self._ahead = multiple, every, ahead
        self._patience, self._probes = patience, probes
        self._state = _AutoBatchState(min(max(base, low), high))
        self._pending: BatchChange | None = None

    def size_at(self, step: int) -> int:
        """The global batch of a step, as far as has been decided."""
        pending = self._pending
        return pending.size if pending is not None and step >= pending.step else self._state.size

    def lr_gain_at(self, step: int) -> float:
        """What the learning rate is multiplied by in a step."""
        return lr_gain(self.law, self.size_at(step), self.base, self._state.scale or 0.0)

    @property
    def progress(self) -> float:
        """How many steps with the base batch have been made, in effect."""
        return self._state.progress

    def on_commit(
        self,
        step: int,
        noise: GradientNoise,
        step_seconds: StepSeconds,
        *,
        costs_known: bool = True,
        cap: int | None = None,
        cost_s: float = 0.0,
        left_s: float = inf,
    ) -> BatchChange | None:
        """Take note of a committed step; perhaps the batch changes.

        `costs_known` is False until members have been measured at two sizes. `cap` is what fits
        into all members together.
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
        if not costs_known:
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
