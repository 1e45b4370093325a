"""Setting ``shares.machines``: what the user knows of machines before they are measured.

::

    machines = machine *("," machine)
    machine  = pattern 1*(" " fact)
    fact     = "speed=" number      relative speed, until steps have been measured
             / "share=" number      weight with ``shares.policy=fixed``
             / "max=" samples       most samples that its memory holds at once

A pattern with a slash names members (``local/0``, ``lab-?/*``), one without names machines: ``lab-1``, or ``spot-*``
for those of pool `spot`. The first pattern that fits a member counts. ``big speed=4 max=256, spot-* speed=1 max=32``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isfinite

from shoal.core.emulation import member_number
from shoal.errors import BadPlan

EXAMPLE = "for example big speed=4 max=256, spot-* speed=1 max=32"
FACTS = ("speed", "share", "max")


@dataclass(frozen=True, slots=True)
class KnownMachine:
    """Declared facts about the members that `pattern` names; None for what is not declared."""

    pattern: str
    speed: float | None = None
    share: float | None = None
    max: int | None = None

    def fits(self, member: str) -> bool:
        """Return whether the pattern names this member, or the machine that it runs on."""
        name = member if "/" in self.pattern else member.rpartition("/")[0] or member
        return fnmatchcase(name, self.pattern)


UNKNOWN_MACHINE = KnownMachine("*")


def facts_of(member: str, machines: Sequence[KnownMachine]) -> KnownMachine:
    """Return what is declared of a member: the first entry that fits it."""
    return next((machine for machine in machines if machine.fits(member)), UNKNOWN_MACHINE)


def parse(text: str) -> tuple[KnownMachine, ...]:
    """Return the entries of a setting, none for an empty one; raise BadPlan if it is malformed.

    >>> parse("spot-* speed=0.5 max=32")
    (KnownMachine(pattern='spot-*', speed=0.5, share=None, max=32),)
    """
    return tuple(_machine(part.split(), text) for part in text.split(",")) if text.strip() else ()


def positions(members: Sequence[str]) -> list[int]:
    """Return the position of each member in a list that the user wrote, whatever order they joined in.

    It is the member's number, as for ``--emulate``; if numbers do not tell the members apart, as on several machines,
    it is the place of its name among all names.

    >>> positions(["local/2", "local/0"]), positions(["b/0", "a/0"])
    ([2, 0], [1, 0])
    """
    numbers = [member_number(member) for member in members]
    if len({member.rpartition("/")[0] for member in members}) == 1 and len(set(numbers)) == len(numbers):
        return numbers
    names = sorted(members, key=lambda member: (member.rpartition("/")[0], member_number(member), member))
    return [names.index(member) for member in members]


def _machine(words: list[str], text: str) -> KnownMachine:
    if len(words) < 2 or "=" in words[0]:
        raise _bad(text, "every entry is a name or a pattern, and then speed=, share= or max=")
    values: dict[str, float] = {}
    for word in words[1:]:
        name, _, value = word.partition("=")
        if name not in FACTS or name in values:
            raise _bad(text, f"{word!r} is not one of speed=, share= and max=, or is given twice")
        values[name] = _number(name, value, text)
    most = values.get("max")
    return KnownMachine(words[0], values.get("speed"), values.get("share"), None if most is None else int(most))


def _number(name: str, value: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    whole = name != "max" or (isfinite(number) and number >= 1 and number == int(number))
    if not isfinite(number) or number < 0 or (number == 0 and name != "share") or not whole:
        expected = "a number of samples ≥ 1" if name == "max" else "a number > 0"
        raise _bad(text, f"{name}={value} is not {expected}")
    return number


def _bad(text: str, why: str) -> BadPlan:
    return BadPlan(f"invalid value for shares.machines: {text!r}", why=why, do=EXAMPLE)
