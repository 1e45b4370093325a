"""Machines of different speeds for tests and benchmarks: the text of `--emulate`, and the shares that are best for it.

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
    """Return the text of `--emulate` with one speed, or schedule such as ``"1:0.25@100"``, for each member.

    With `sample_s` a step takes ``fixed_s + sample_s * samples / speed`` seconds, which is the steadiest on a busy
    machine; without it, the real work is stretched.
    """
    costs = {} if sample_s is None else {"sample_s": sample_s, "fixed_s": fixed_s}
    text = ",".join([*(f"{name}={value!r}" for name, value in costs.items()), *map(str, speeds)])
    emulation.parse(text)
    return text


def emulated(body: Callable[[FixedWorldSession], T], text: str) -> Callable[[FixedWorldSession], T]:
    """Wrap a body for `together` so that its members run at these speeds; a thread's number is its member's."""

    def slower(session: FixedWorldSession) -> T:
        session.settings = msgspec.structs.replace(session.settings, emulate=text)
        return body(session)

    return slower


def step_s(text: str, shares: Sequence[int], step: int = 0) -> float:
    """Return the seconds of a synchronous step with these shares: those of its slowest member."""
    costs = _costs(text)
    return max(costs.cost_s(member, share, step) or 0.0 for member, share in enumerate(shares))


def best_shares(text: str, size: int, members: int, step: int = 0) -> tuple[int, ...]:
    """Return the shares with the shortest step: each sample goes to the member that would finish it first."""
    costs = _costs(text)
    shares = [0] * members
    ends = [(costs.cost_s(member, 1, step) or 0.0, member) for member in range(members)]
    heapq.heapify(ends)
    for _ in range(size):
        member = ends[0][1]
        shares[member] += 1
        heapq.heapreplace(ends, (costs.cost_s(member, shares[member] + 1, step) or 0.0, member))
    return tuple(shares)


def _costs(text: str) -> Emulation:
    parsed = emulation.parse(text)
    if parsed is None or parsed.sample_s is None:
        raise ValueError(f"{text!r} has no sample_s, so the duration of a step is not known in advance")
    return parsed
