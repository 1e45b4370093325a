"""Emulation of slower machines (the setting `emulate`): a member sleeps as long as the slower machine would still work.

The sleep has to come before the gradients are sent, so that the other members wait as they would for a slow machine.
But gradients are sent during the last backward pass, whose duration is unknown beforehand. So most of its expected
extra time is slept before it and the remainder after it: too short a sleep can be corrected, too long a sleep cannot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shoal.core import emulation
from shoal.core.emulation import EmulatedMachine, Emulation

# Part of the expected backward pass that is accounted for before it begins.
ADVANCE_FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class Clocks:
    """Time sources and sleep, replaceable in tests; `cpu_s` counts the calling thread only."""

    wall_s: Callable[[], float] = time.perf_counter
    cpu_s: Callable[[], float] = time.thread_time
    sleep: Callable[[float], None] = time.sleep

    def sleep_if_positive(self, seconds: float) -> float:
        """Sleep and return the seconds slept, 0 if `seconds` is negative."""
        if seconds > 0:
            self.sleep(seconds)
        return max(seconds, 0.0)


SYSTEM_CLOCKS = Clocks()


class Slowdown(Protocol):
    """Hooks that the training loop calls in every step."""

    def begin(self, step: int) -> None:
        """Start the clock of a step; called before its data is read."""
        ...

    def before_exchange(self, samples: int, last: int) -> None:
        """Sleep before the last backward pass, of `last` samples; the step has `samples` in all."""
        ...

    def after_backward(self) -> None:
        """Sleep what remains after the last backward pass."""
        ...


class StretchedCompute:
    """Slowdown that stretches the real work: a machine of a quarter of the speed takes four times as long."""

    def __init__(self, machine: EmulatedMachine, clocks: Clocks = SYSTEM_CLOCKS) -> None:
        self._machine, self._clocks = machine, clocks
        self._factor, self._began_s, self._backward_s, self._slept_s = 0.0, 0.0, 0.0, 0.0
        self._samples, self._measured_samples, self._measured_s = 0, 0, 0.0

    def begin(self, step: int) -> None:
        self._factor = 1 / self._machine.speed_at(step) - 1
        self._began_s = self._clocks.cpu_s()

    def before_exchange(self, samples: int, last: int) -> None:  # noqa: ARG002
        # Not more than measured: most of a small backward pass costs the same for any number of samples.
        scale = min(1.0, last / self._measured_samples) if self._measured_samples else 0.0
        done_s = self._clocks.cpu_s() - self._began_s
        due_s = self._factor * (done_s + ADVANCE_FRACTION * (self._measured_s * scale))
        self._slept_s = self._clocks.sleep_if_positive(due_s)
        self._samples, self._backward_s = last, self._clocks.cpu_s()

    def after_backward(self) -> None:
        now_s = self._clocks.cpu_s()
        self._measured_samples, self._measured_s = self._samples, now_s - self._backward_s
        self._clocks.sleep_if_positive(self._factor * (now_s - self._began_s) - self._slept_s)


class FixedStepCost:
    """Slowdown that makes every step last its configured time, if the real work takes less."""

    def __init__(self, costs: Emulation, number: int, clocks: Clocks = SYSTEM_CLOCKS) -> None:
        self._costs, self._number, self._clocks = costs, number, clocks
        self._step, self._began_s, self._until_s, self._backward_s = 0, 0.0, 0.0, 0.0
        self._samples, self._measured_samples, self._measured_s = 0, 0, 0.0

    def begin(self, step: int) -> None:
        self._step, self._began_s = step, self._clocks.wall_s()

    def before_exchange(self, samples: int, last: int) -> None:
        self._until_s = self._began_s + (self._costs.cost_s(self._number, samples, self._step) or 0.0)
        if self._measured_samples:
            expected_s = self._measured_s * max(1.0, last / self._measured_samples)
            self._clocks.sleep_if_positive(self._until_s - expected_s / ADVANCE_FRACTION - self._clocks.wall_s())
        self._samples, self._backward_s = last, self._clocks.wall_s()

    def after_backward(self) -> None:
        now_s = self._clocks.wall_s()
        # A decaying maximum: to begin the backward pass too early is harmless, the rest is slept here.
        latest = (now_s - self._backward_s, self._samples)
        remembered = (ADVANCE_FRACTION * self._measured_s, self._measured_samples)
        self._measured_s, self._measured_samples = max(latest, remembered)
        self._clocks.sleep_if_positive(self._until_s - now_s)


def slowdown_for(member: str, text: str) -> Slowdown | None:
    """Return the slowdown of a member under the setting `emulate`, None if it runs at full speed."""
    parsed = emulation.parse(text)
    if parsed is None:
        return None
    number = emulation.member_number(member)
    if parsed.sample_s is not None:
        return FixedStepCost(parsed, number)
    machine = parsed.machine(number)
    return None if machine == EmulatedMachine(1.0) else StretchedCompute(machine)
