"""Faults of a job with three members: one function per fault, which returns its cost in seconds."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

from benchmarks import processes
from benchmarks.commits import Commit, TimedOutError, longest_gap_s, step_time_s, steps_lost
from benchmarks.sides.side import MOST_MEMBERS, Side

STEADY_S = 120.0
RECOVERY_S = 120.0
Figures = dict[str, float]


def crash(side: Side, chance: random.Random) -> Figures:
    """Kill one member with SIGKILL at a random point of a step; the side restarts it by its own means."""
    pids = side.commits.wait_until_steady(MOST_MEMBERS, STEADY_S, side.alive)
    victim = chance.choice(pids)
    _wait_within_step(side, chance)
    at = processes.send(victim, signal.SIGKILL)
    figures = _recovery(side, at, pids, victim)
    figures["back_s"] = _first_contribution(side, at, pids).at - at
    return figures


def hang(side: Side, chance: random.Random) -> Figures:
    """Stop one member with SIGSTOP, and continue it once the others train again."""
    pids = side.commits.wait_until_steady(MOST_MEMBERS, STEADY_S, side.alive)
    victim = chance.choice(pids)
    _wait_within_step(side, chance)
    at = processes.send(victim, signal.SIGSTOP)
    try:
        figures = _recovery(side, at, pids, victim)
    finally:
        if processes.is_running(victim):
            processes.send(victim, signal.SIGCONT)
    try:
        side.commits.wait_until_steady(MOST_MEMBERS, 20.0, side.alive)
    except TimedOutError:
        if processes.is_running(victim):
            processes.send(victim, signal.SIGKILL)
    return figures


def notice(side: Side, chance: random.Random) -> Figures:
    """Send SIGTERM to one member; return the time until it has ended and the cost to the others."""
    pids = side.commits.wait_until_steady(MOST_MEMBERS, STEADY_S, side.alive)
    victim = chance.choice(pids)
    _wait_within_step(side, chance)
    at = processes.send(victim, signal.SIGTERM)
    while processes.is_running(victim):
        if time.monotonic() - at > RECOVERY_S:
            raise TimedOutError("the member did not go")
        time.sleep(0.002)
    gone_s = time.monotonic() - at
    return {"gone_s": gone_s, **_recovery(side, at, pids, victim)}


def loss(side: Side, chance: random.Random) -> Figures:
    """Remove a member and the process that keeps it running, at once and for good."""
    pids = side.commits.wait_until_steady(MOST_MEMBERS, STEADY_S, side.alive)
    victim = chance.choice([pid for pid in pids if side.can_lose(pid)])
    _wait_within_step(side, chance)
    at = time.monotonic()
    side.remove(victim)
    return _recovery(side, at, pids, victim)


def join(side: Side, chance: random.Random) -> Figures:
    """Add one member to two that train; return their stall and the time of the third's first contribution."""
    pids = side.commits.wait_until_steady(MOST_MEMBERS - 1, STEADY_S, side.alive)
    _wait_within_step(side, chance)
    at = time.monotonic()
    side.add()
    first = _first_contribution(side, at, pids)
    side.commits.wait_until_steady(MOST_MEMBERS, STEADY_S, side.alive)
    usual_s = step_time_s(side.commits.before(at)[-60:])
    later_s = step_time_s([commit for commit in side.commits.after(first.at) if commit.pid in pids][:30])
    met = next(commit.at for commit in side.commits.after(at) if commit.world == first.world)
    starting = [commit for commit in side.commits.after(at) if commit.at < met and commit.pid in pids]
    stall_s = _stall_s(side, at, first.at, pids, since=met - 2 * usual_s)
    return {
        "contributes_s": first.at - at,
        # With more members than cores every step is longer afterwards, and that is no stall.
        "stall_s": max(0.0, stall_s - max(0.0, later_s - usual_s)),
        "slowdown_while_starting": step_time_s(starting) / usual_s,
        "lost_steps": steps_lost(side.commits.before(at), side.commits.after(at)),
        "step_s": usual_s,
        "step_after_s": later_s,
    }


def blackout(side: Side, down_s: float) -> Figures:
    """Kill the coordinator with SIGKILL and start it again after `down_s`."""
    pids = side.commits.wait_until_steady(MOST_MEMBERS, STEADY_S, side.alive)
    time.sleep(min(down_s, 10.0))
    at = time.monotonic()
    usual_s = step_time_s(side.commits.before(at, within_s=min(down_s, 10.0)))
    side.stop_coordinator()
    time.sleep(down_s)
    back = time.monotonic()
    during = side.commits.before(back, within_s=down_s)
    side.start_coordinator()
    first = side.commits.wait_for(lambda commit: commit.size > 0, back, RECOVERY_S, side.alive)
    figures = {
        "down_s": down_s,
        "steps_during": len({commit.step for commit in during if commit.pid in pids}),
        "steps_expected": down_s / usual_s,
        "slowdown": step_time_s(during) / usual_s,
        "lost_steps": steps_lost(side.commits.before(at), side.commits.after(at)),
        "stall_s": _stall_s(side, at, first.at, pids),
    }
    pids = side.commits.wait_until_steady(MOST_MEMBERS, STEADY_S, side.alive)
    victim = pids[0]
    at = processes.send(victim, signal.SIGKILL)
    figures["next_kill_to_commit_s"] = _recovery(side, at, pids, victim)["recovery_s"]
    return figures


def _wait_within_step(side: Side, chance: random.Random) -> None:
    """Sleep until a uniformly random point within the next ten steps."""
    commits = side.commits.refresh()
    time.sleep(chance.random() * 10 * max(0.01, step_time_s(commits[-30:])))


def _recovery(side: Side, at: float, pids: list[int], victim: int) -> Figures:
    """Return the time from the fault to the first step committed without the victim."""
    before = side.commits.before(at)
    first = side.commits.wait_for(_of_next_world(before[-1].world, pids, victim), at, RECOVERY_S, side.alive)
    return {
        "recovery_s": first.at - at,
        "stall_s": _stall_s(side, at, first.at, [pid for pid in pids if pid != victim]),
        "lost_steps": steps_lost(before, [first]),
        "step_s": step_time_s(before[-60:]),
    }


def _of_next_world(world: str, pids: list[int], victim: int) -> Callable[[Commit], bool]:
    return lambda commit: commit.pid != victim and (commit.world != world or commit.pid not in pids)


def _first_contribution(side: Side, at: float, pids: list[int]) -> Commit:
    """Return the first step to which a new process contributed samples."""
    return side.commits.wait_for(
        lambda commit: commit.pid not in pids and commit.samples > 0 and commit.size == MOST_MEMBERS,
        at,
        RECOVERY_S,
        side.alive,
    )


def _stall_s(side: Side, at: float, event: float, others: list[int], since: float = 0.0) -> float:
    """Return the longest wait for a commit that ended between `since` and `event`, less the usual step time.

    It is that of the processes in `others`, or of the whole job if none of them lived until the event.
    """
    usual_s = step_time_s(side.commits.before(at)[-60:])
    around = [commit for commit in side.commits.after(at - 3 * usual_s) if commit.at <= event + max(0.1, usual_s)]
    lasting = {commit.pid for commit in around if commit.at >= event} & set(others)
    return max(0.0, longest_gap_s(around, lasting, since=max(at, since)) - usual_s)
