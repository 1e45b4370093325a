"""Automatic global batch: looks at the goodput now and then, and changes the batch when that pays.

A look every `every` steps asks `goodput.best` for the best size. A change is decided if `confirmations` looks in a row
want the same direction, and holds `ahead` steps later, because data is read ahead. Until the members have been measured
at two batch sizes, fixed and per-sample costs cannot be told apart: then one or two probes try another size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from shoal.core.batch.goodput import BatchChoice, Bounds, LrScaling, StepSeconds, best, lr_gain, progress, round_bounds
from shoal.core.batch.gradient_noise import GradientNoise
from shoal.core.nouns import counted
from shoal.core.validation import checked_int


@dataclass(frozen=True, slots=True)
class BatchChange:
    """A new global batch size, the step from which it holds, and the reason."""

    step: int
    size: int
    reason: str


@dataclass(slots=True)
class _AutoBatchState:
    """State in a snapshot. `streak` counts looks that wanted a larger batch, negative a smaller one."""

    size: int
    progress: float = 0.0
    last_look: int = -1
    streak: int = 0
    probes: int = 0
    scale: float | None = None


class AutoBatch:
    """The global batch of a run; every member advances its own copy with the same figures, so all agree.

    `base` is the batch that the script asks for, `bounds` what may be chosen, `multiple` what it must be a multiple of.
    """

    def __init__(
        self,
        base: int,
        bounds: Bounds,
        scaling: LrScaling = "adascale",
        *,
        multiple: int = 1,
        every: int = 10,
        ahead: int = 2,
        confirmations: int = 2,
        max_probes: int = 2,
    ) -> None:
        low, high = round_bounds(bounds, multiple)
        for name, value in (("base", base), ("every", every), ("ahead", ahead), ("confirmations", confirmations)):
            checked_int(name, value)
        self.base, self.bounds, self.scaling = base, (low, high), scaling
        self._multiple, self._every, self._ahead = multiple, every, ahead
        self._confirmations, self._max_probes = confirmations, max_probes
        self._state = _AutoBatchState(min(max(base, low), high))
        self._pending: BatchChange | None = None

    def size_at(self, step: int) -> int:
        """Return the global batch size of a step, as far as it has been decided."""
        pending = self._pending
        return pending.size if pending is not None and step >= pending.step else self._state.size

    def lr_gain_at(self, step: int, samples: int) -> float:
        """Return the factor on the learning rate in a step with so many samples."""
        return lr_gain(self.scaling, self._size_of(step, samples), self.base, self._state.scale or 0.0)

    def _size_of(self, step: int, samples: int) -> int:
        """Return the size that counts for a step: what it has, if fewer samples were left in its epoch.

        While the batch is that of the script, the short last step of an epoch counts as a whole one, as it does
        without an automatic batch.
        """
        size = self.size_at(step)
        return size if size == self.base else min(size, samples)

    @property
    def progress(self) -> float:
        """Number of steps with the base batch that the steps so far stand for."""
        return self._state.progress

    def on_commit(
        self,
        step: int,
        samples: int,
        noise: GradientNoise,
        step_seconds: StepSeconds,
        *,
        costs_known: bool = True,
        cap: int | None = None,
        cost_s: float = 0.0,
        left_s: float = inf,
    ) -> BatchChange | None:
        """Record a committed step with so many samples; return the change of the batch that it leads to, if any.

        `costs_known` is False until members have been measured at two sizes. `cap` is what fits into the memory of
        all members together. A change costs `cost_s` of the `left_s` seconds that are left.
        """
        state = self._state
        state.progress += progress(self.scaling, self._size_of(step, samples), self.base, state.scale or 0.0)
        if self._pending is not None and step + 1 >= self._pending.step:
            state.size, self._pending = self._pending.size, None
        scale = noise.scale
        # Without a clear signal the noise scale is at least its floor, and hardly below its last known value.
        state.scale = scale if scale is not None else _larger(state.scale, noise.floor)
        if self._pending is not None or state.scale is None or step - state.last_look < self._every:
            return None
        state.last_look = step
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
        return self._confirm(step, choice, scale_known=scale is not None)

    def _confirm(self, step: int, choice: BatchChoice, *, scale_known: bool) -> BatchChange | None:
        """Decide on a choice once enough looks in a row wanted the same direction."""
        state = self._state
        direction = (choice.size > state.size) - (choice.size < state.size)
        if choice.gain and not scale_known and direction < 0:
            direction = 0
        state.streak = 0 if not direction else direction + (state.streak if state.streak * direction > 0 else 0)
        if not direction or (choice.gain and abs(state.streak) < self._confirmations):
            return None
        return self._decide(step, choice.size, choice.reason)

    def _probe(self, step: int) -> BatchChange | None:
        """Try another size, once or twice, to tell the cost of a step from that of a sample."""
        state = self._state
        if state.probes >= self._max_probes:
            return None
        low, high = self.bounds
        up = min(high, 2 * state.size // self._multiple * self._multiple)
        down = max(low, -(-state.size // 2 // self._multiple) * self._multiple)
        preferred, other = (up, down) if (state.scale or 0.0) >= state.size else (down, up)
        size = preferred if preferred != state.size else other
        if size == state.size:
            return None
        state.probes += 1
        return self._decide(
            step, size, f"{size} instead of {counted(state.size, 'sample')}, to measure the fixed cost of a step"
        )

    def _decide(self, step: int, size: int, reason: str) -> BatchChange:
        self._pending = BatchChange(step + 1 + self._ahead, size, reason)
        self._state.last_look = self._pending.step
        return self._pending

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a snapshot."""
        return asdict(self._state) | {"pending": asdict(self._pending) if self._pending is not None else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        values = dict(state)
        pending = values.pop("pending")
        self._state = _AutoBatchState(**values)
        self._pending = BatchChange(**pending) if pending is not None else None


def _larger(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else max(a, b)
