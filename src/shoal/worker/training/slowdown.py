"""Makes a member as slow as a slower machine: it sleeps as long as that machine would have gone on working.

Sleeping comes before the gradients are sent, so that the others wait for them as they would for a slow machine. What
the last backward pass will cost is not known by then: a little less than expected is slept before, the rest after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shoal.core import emulation
from shoal.core.emulation import EmulatedMachine, Emulation

# Of the backward pass that is expected: sleeping too long could not be made good, the rest of too short can.
BEFORE = 0.9


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where time comes from, and how it is spent; the CPU time is that of the calling thread alone."""

    wall_s: Callable[[], float] = time.perf_counter
    cpu_s: Callable[[], float] = time.thread_time
    sleep: Callable[[float], None] = time.sleep

    def rest(self, seconds: float) -> float:
        """Sleep, if there is anything to sleep."""
        if seconds > 0:
            self.sleep(seconds)
        return max(seconds, 0.0)


REAL = Clocks()


class Slowdown(Protocol):
    """What the training loop tells of every step."""

    def begin(self, step: int) -> None:
        """The data of a step is about to be read."""
        ...

    def before_exchange(self, samples: int, last: int) -> None:
        """Everything of a step of `samples` is computed but the backward pass of its last piece, of `last` samples."""
        ...

    def after_backward(self) -> None:
        """The last backward pass is done."""
        ...


class StretchedCompute:
    """Stretches the real work: a machine of a quarter of the speed takes four times as long."""

    def __init__(self, machine: EmulatedMachine, clocks: Clocks = REAL) -> None:
        self._machine, self._clocks = machine, clocks
        self._factor, self._began_s, self._backward_s, self._slept_s = 0.0, 0.0, 0.0, 0.0
        self._samples, self._known, self._known_s = 0, 0, 0.0

    def begin(self, step: int) -> None:
        self._factor = 1 / self._machine.speed_at(step) - 1
        self._began_s = self._clocks.cpu_s()

    def before_exchange(self, samples: int, last: int) -> None:  # noqa: ARG002
        # More samples than before need not cost more: most of a small backward pass is the same for any number.
        expected_s = self._known_s * min(1.0, last / self._known) if self._known else 0.0
        done_s = self._clocks.cpu_s() - self._began_s
        self._slept_s = self._clocks.rest(self._factor * (done_s + BEFORE * expected_s))
        self._samples, self._backward_s = last, self._clocks.cpu_s()

    def after_backward(self) -> None:
        now_s = self._clocks.cpu_s()
        self._known, self._known_s = self._samples, now_s - self._backward_s
        self._clocks.rest(self._factor * (now_s - self._began_s) - self._slept_s)


class FixedStepCost:
    """Makes a step take the time that it is said to cost, if the real work takes less."""

    def __init__(self, told: Emulation, number: int, clocks: Clocks = REAL) -> None:
        self._told, self._number, self._clocks = told, number, clocks
        self._step, self._began_s, self._until_s, self._backward_s = 0, 0.0, 0.0, 0.0
        self._samples, self._known, self._known_s = 0, 0, 0.0

    def begin(self, step: int) -> None:
        self._step, self._began_s = step, self._clocks.wall_s()

    def before_exchange(self, samples: int, last: int) -> None:
        self._until_s = self._began_s + (self._told.cost_s(self._number, samples, self._step) or 0.0)
        if self._known:
            expected_s = self._known_s * max(1.0, last / self._known)
            self._clocks.rest(self._until_s - expected_s / BEFORE - self._clocks.wall_s())
        self._samples, self._backward_s = last, self._clocks.wall_s()

    def after_backward(self) -> None:
        now_s = self._clocks.wall_s()
        # The longest of late: whoever begins the backward pass too early can still wait after it.
        latest, known = (now_s - self._backward_s, self._samples), (BEFORE * self._known_s, self._known)
        self._known_s, self._known = max(latest, known)
        self._clocks.rest(self._until_s - now_s)


def pace_of(member: str, text: str) -> Slowdown | None:
    """The pace of a member by the setting `emulate`; None if it is as fast as it is."""
    told = emulation.parse(text)
    if told is None:
        return None
    number = emulation.member_number(member)
    if told.sample_s is not None:
        return FixedStepCost(told, number)
    machine = told.machine(number)
    return None if machine == EmulatedMachine(1.0) else StretchedCompute(machine)
