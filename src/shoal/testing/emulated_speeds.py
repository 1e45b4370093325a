"""Unequal machines for tests and benchmarks: the text of `--emulate`, threads that obey it, and what is best for it.

Example::

    text = machines(1, 0.25, sample_s=0.002)
    together(2, emulated(body, text))                 # in threads
    subprocess.run(["shoal", "run", "-n", "2", "--emulate", text, "train.py"])
    best = best_shares(text, size=64, members=2)      # (52, 12)
    step_s(text, best) / step_s(text, (32, 32))
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from shoal.core import emulation
from shoal.core.emulation import Emulation
from shoal.testing.threaded_world import FixedWorldSession

T = TypeVar("T")
Speed = float | str


def machines(*speeds: Speed, sample_s: float | None = None, fixed_s: float = 0.0) -> str:
    """The text of `--emulate`: one speed for each member, or a schedule such as ``"1:0.25@100"``.

    With `sample_s` a step takes ``fixed_s + sample_s * samples / speed`` seconds, which is the steadiest on a busy
    machine; without, the real work is stretched.
    """
    costs = {} if sample_s is None else {"sample_s": sample_s, "fixed_s": fixed_s}
    text = ",".join([*(f"{name}={value!r}" for name, value in costs.items()), *map(str, speeds)])
    emulation.parse(text)
    return text


def emulated(body: Callable[[FixedWorldSession], T], text: str) -> Callable[[FixedWorldSession], T]:
    """A body for `together` whose members behave like these machines; the thread's number is the member's."""

    def slower(session: FixedWorldSession) -> T:
        session.settings = msgspec.structs.replace(session.settings, emulate=text)
        return body(session)

    return slower


def step_s(text: str, shares: Sequence[int], step: int = 0) -> float:
    """How long a synchronous step takes with these shares: as long as its slowest member."""
    told = _costs(text)
    return max(told.cost_s(member, share, step) or 0.0 for member, share in enumerate(shares))


def best_shares(text: str, size: int, members: int, step: int = 0) -> tuple[int, ...]:
    """The shares whose step is the shortest that there is: each sample goes where it would be done first."""
    told = _costs(text)
    shares = [0] * members
    ends = [(told.cost_s(member, 1, step) or 0.0, member) for member in range(members)]
    heapq.heapify(ends)
    for _ in range(size):
        member = ends[0][1]
        shares[member] += 1
        heapq.heapreplace(ends, (told.cost_s(member, shares[member] + 1, step) or 0.0, member))
    return tuple(shares)


def _costs(text: str) -> Emulation:
    told = emulation.parse(text)
    if told is None or told.sample_s is None:
        raise ValueError(f"{text!r} has no sample_s: only the machine itself knows how long its work takes")
    return told
