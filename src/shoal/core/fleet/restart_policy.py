"""How often a member is started again, and how soon.

The user's errors, the machines' failures and preemptions are counted apart: a bug should stop a run soon, a bad
network late, and a spot market never. Nothing is held against anybody for good: only a window of time counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Union

Cause = Literal["user", "infrastructure", "preempted"]


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """`user` and `infrastructure` are restarts allowed within `window_s`; `healthy_s` alive forgives the back-off."""

    user: int = 2
    infrastructure: int = 10
    window_s: float = 3600.0
    backoff_s: float = 0.2
    backoff_max_s: float = 30.0
    healthy_s: float = 60.0


@dataclass(frozen=True, slots=True)
class PastExit:
    """An earlier end of a member, and why."""

    at: float
    cause: str


@dataclass(frozen=True, slots=True)
class RestartAfter:
    after_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class StopRestarting:
    reason: str


Decision = Union[RestartAfter, StopRestarting]


def decide(history: Sequence[PastExit], cause: Cause, now: float, settings: RestartLimits) -> Decision:
    """Whether to start a member again that just ended by `cause`; `history` is what happened before, oldest first.

    >>> decide([], "infrastructure", 0.0, BudgetSettings())
    Restart(after_s=0.0, reason='restart 1 of at most 10 after infrastructure failures')
    """
    if cause == "preempted":
        return RestartAfter(0.0, "preemption is nobody's fault: restarts are unlimited")
    allowed = settings.user if cause == "user" else settings.infrastructure
    name = "errors of the user's code" if cause == "user" else "infrastructure failures"
    spent = sum(loss.cause == cause and now - loss.at < settings.window_s for loss in history)
    if spent >= allowed:
        if allowed == 0:
            return StopRestarting(f"no restarts are allowed after {name}")
        return StopRestarting(f"{spent + 1} {name} within {settings.window_s:.0f} s; {allowed} restarts are allowed")
    return RestartAfter(_pause_s(history, now, settings), f"restart {spent + 1} of at most {allowed} after {name}")


def _pause_s(history: Sequence[PastExit], now: float, settings: RestartLimits) -> float:
    """At once the first time; then doubling for every failure that came soon after the one before."""
    in_a_row = 0
    later = now
    for loss in reversed(history):
        if later - loss.at >= settings.healthy_s:
            break
        if loss.cause in ("user", "infrastructure"):
            in_a_row += 1
            later = loss.at
    if in_a_row == 0:
        return 0.0
    return float(min(settings.backoff_max_s, settings.backoff_s * 2.0 ** min(in_a_row - 1, 60)))
