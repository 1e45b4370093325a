"""Emulation (``--emulate``): the machine that each member behaves like, and how its speed changes over the steps.

::

    emulate = part *("," part)
    part    = speed *(":" speed "@" step)      the machine of one member; the position is the member's number
            / "sample_s=" seconds              time of a sample on a machine of speed 1
            / "fixed_s=" seconds               time of a step on any machine, beside its samples

``1,0.5:0.125@300`` is a member at its real speed, and one at half its speed that drops to an eighth when step 300
begins. With ``sample_s`` a step takes ``fixed_s + sample_s * samples / speed``, whatever the real work takes.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field

from shoal.errors import BadEmulation

SLOWEST = 0.001
EXAMPLE = "for example 1,0.5,0.25, or 1,0.5:0.125@300 for a speed that changes when step 300 begins"
COSTS = ("sample_s", "fixed_s")


@dataclass(frozen=True, slots=True)
class EmulatedMachine:
    """Relative speed of one member, in (0, 1]; `changes` are pairs of a step and the speed from then on."""

    speed: float
    changes: tuple[tuple[int, float], ...] = ()

    def speed_at(self, step: int) -> float:
        """Return the speed in a step."""
        speed = self.speed
        for begins, later in self.changes:
            if step >= begins:
                speed = later
        return speed


@dataclass(frozen=True, slots=True)
class Emulation:
    """Machines of a run by member number; without `sample_s` the real work is slowed down."""

    machines: tuple[EmulatedMachine, ...] = field(default=(EmulatedMachine(1.0),))
    sample_s: float | None = None
    fixed_s: float = 0.0

    def machine(self, number: int) -> EmulatedMachine:
        """Return the machine of a member; members beyond the list are like the last."""
        return self.machines[min(number, len(self.machines) - 1)]

    def cost_s(self, number: int, samples: int, step: int) -> float | None:
        """Return the seconds that a member takes for so many samples, None if the real work decides."""
        if self.sample_s is None:
            return None
        return self.fixed_s + self.sample_s * samples / self.machine(number).speed_at(step)


def member_number(member: str) -> int:
    """Return the number in a member's name, such as 2 in ``local/2``; 0 if it has none."""
    last = member.rpartition("/")[2]
    return int(last) if last.isdecimal() else 0


def parse(text: str, where: str = "") -> Emulation | None:
    """Return the emulation that a setting describes, None for an empty one; raise BadEmulation if it is malformed."""
    if not text.strip():
        return None
    machines: list[EmulatedMachine] = []
    costs: dict[str, float] = {}
    for part in (part.strip() for part in text.split(",")):
        name, equals, value = part.partition("=")
        if equals:
            _add_cost(costs, name.strip(), value.strip(), where)
        else:
            machines.append(_machine(part, where))
    if "fixed_s" in costs and "sample_s" not in costs:
        raise BadEmulation(
            "fixed_s requires sample_s", where=where, why="a speed applies to samples only", do="add sample_s=…"
        )
    return Emulation(tuple(machines) or (EmulatedMachine(1.0),), costs.get("sample_s"), costs.get("fixed_s", 0.0))


def _add_cost(costs: dict[str, float], name: str, value: str, where: str) -> None:
    if name not in COSTS:
        near = difflib.get_close_matches(name, COSTS, n=1)
        do = f"did you mean {near[0]}={value}?" if near else f"use {' or '.join(COSTS)}; {EXAMPLE}"
        raise BadEmulation(f"unknown key {name!r} in an emulation", where=where, do=do)
    if name in costs:
        raise BadEmulation(f"{name} is given twice", where=where, do="remove one of them")
    seconds = _number(value)
    if seconds is None or seconds < 0 or (name == "sample_s" and seconds == 0):
        raise BadEmulation(
            f"invalid {name} {value!r}", where=where, why="expected a number of seconds", do=f"for example {name}=0.002"
        )
    costs[name] = seconds


def _machine(part: str, where: str) -> EmulatedMachine:
    first, *rest = (speed.strip() for speed in part.split(":"))
    if ">" in part:
        do = f"did you mean {part.replace('>', ':')}? (a shell would take > for a file)"
        raise BadEmulation(f"invalid speed {part!r}", where=where, do=do)
    if "@" in first:
        do = f"write the first speed alone: 1:{first}"
        raise BadEmulation(f"no speed before the first change in {part!r}", where=where, do=do)
    changes: list[tuple[int, float]] = []
    for change in rest:
        speed, at, step = (text.strip() for text in change.partition("@"))
        if not at or not step.isdecimal():
            why = "a change is a speed and the step at which it begins"
            raise BadEmulation(
                f"invalid change of speed {change!r} in {part!r}",
                where=where,
                why=why,
                do=f"for example {first}:0.25@300",
            )
        if int(step) <= (changes[-1][0] if changes else 0):
            why = "changes must be in the order of their steps, and the first speed holds from step 0"
            raise BadEmulation(f"step {step} in {part!r} is out of order", where=where, why=why, do=EXAMPLE)
        changes.append((int(step), _speed(speed, where)))
    return EmulatedMachine(_speed(first, where), tuple(changes))


def _speed(text: str, where: str) -> float:
    speed = _number(text)
    if speed is None:
        raise BadEmulation(f"invalid speed {text!r}", where=where, why="expected a number", do=_nearest(text))
    if speed > 1:
        why = "a machine cannot be faster than it is: 1 is its real speed"
        raise BadEmulation(f"invalid speed {text}", where=where, why=why, do=f"did you mean {1 / speed:.3g}?")
    if speed < SLOWEST:
        why = f"the minimum is {SLOWEST}: a machine that stands still is no member"
        raise BadEmulation(f"invalid speed {text}", where=where, why=why, do=EXAMPLE)
    return speed


def _nearest(text: str) -> str:
    if text.endswith("%") and (percent := _number(text[:-1])) is not None:
        return f"did you mean {percent / 100:g}?"
    if text.lower().endswith("x") and _number(text[:-1]) is not None:
        return f"did you mean {text[:-1]}?"
    return EXAMPLE


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
