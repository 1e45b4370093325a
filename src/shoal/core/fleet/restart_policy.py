"""Restart policy: whether and when a member that ended is started again.

Errors of the user's code, failures of machines and preemptions have separate limits: a bug should stop a run soon, a
bad network late, and a spot market never. Only exits within a window of time count, so no member is given up for good.

Before the run has committed its first step, an error of the user's code is most likely a plain mistake, which no
restart cures. There `decide_before_first_step` restarts only while the error may concern one member alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Union

from shoal.core.nouns import be, counted

Cause = Literal["user", "infrastructure", "preempted"]

# Pause of a restart before the first step: long enough to see whether other members fail with the same error.
COMPARE_S = 1.0


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """Restarts allowed within `window_s`, by cause, and the pause before each.

    The pause doubles from `backoff_s` to `backoff_max_s`; a process that lived for `healthy_s` starts again from zero.
    """

    user: int = 2
    infrastructure: int = 10
    window_s: float = 3600.0
    backoff_s: float = 0.2
    backoff_max_s: float = 30.0
    healthy_s: float = 60.0


@dataclass(frozen=True, slots=True)
class PastExit:
    """An earlier exit of a member, its cause, and the error as one line."""

    at: float
    cause: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """Restart the member after so many seconds."""

    after_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class StopRestarting:
    """Do not restart the member: it reached a limit."""

    reason: str


Decision = Union[RestartAfter, StopRestarting]


def decide(history: Sequence[PastExit], cause: Cause, now: float, settings: RestartLimits) -> Decision:
    """Return whether to restart a member that just ended by `cause`; `history` are its earlier exits, oldest first.

    >>> decide([], "infrastructure", 0.0, RestartLimits())
    RestartAfter(after_s=0.0, reason='restart 1 of at most 10 after infrastructure failures')
    """
    if cause == "preempted":
        return RestartAfter(0.0, "restarts after a preemption are unlimited")
    allowed = settings.user if cause == "user" else settings.infrastructure
    name = "errors of the user's code" if cause == "user" else "infrastructure failures"
    used = sum(past.cause == cause and now - past.at < settings.window_s for past in history)
    if used >= allowed:
        if allowed == 0:
            return StopRestarting(f"no restarts are allowed after {name}")
        return StopRestarting(
            f"{used + 1} {name} within {settings.window_s:.0f} s; {counted(allowed, 'restart')} {be(allowed)} allowed"
        )
    return RestartAfter(_pause_s(history, now, settings), f"restart {used + 1} of at most {allowed} after {name}")


def decide_before_first_step(
    histories: Mapping[str, Sequence[PastExit]],
    member: str,
    error: str,
    members: Collection[str],
    now: float,
    settings: RestartLimits,
) -> Decision:
    """Return whether to restart a member after an error of the user's code before the first committed step.

    `histories` are the earlier exits of each member, `members` those that the run has at present. The same error from
    another member, or from the same one again, and any error of the only member stop the run.
    """
    failed = {
        name
        for name, history in histories.items()
        if any(past.cause == "user" and past.error == error and now - past.at < settings.window_s for past in history)
    }
    if len(members) <= 1:
        return StopRestarting("not restarted: the only member failed before the first step")
    if failed - {member}:
        count = len(failed | {member})
        subject = "every member" if set(members) <= failed | {member} else counted(count, "member")
        return StopRestarting(f"not restarted: {subject} failed with the same error before the first step")
    if member in failed:
        return StopRestarting("not restarted: it failed twice with the same error before the first step")
    decision = decide(histories.get(member, ()), "user", now, settings)
    if isinstance(decision, RestartAfter):
        return RestartAfter(max(COMPARE_S, decision.after_s), decision.reason)
    return decision


def _pause_s(history: Sequence[PastExit], now: float, settings: RestartLimits) -> float:
    """Return the pause before a restart: none at first, then doubled for each failure soon after the one before."""
    in_a_row = 0
    later = now
    for past in reversed(history):
        if later - past.at >= settings.healthy_s:
            break
        if past.cause in ("user", "infrastructure"):
            in_a_row += 1
            later = past.at
    if in_a_row == 0:
        return 0.0
    return float(min(settings.backoff_max_s, settings.backoff_s * 2.0 ** min(in_a_row - 1, 60)))
