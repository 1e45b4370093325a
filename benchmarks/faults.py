"""What happens to a job of three members, and what it cost: one function a fault, seconds out."""

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
    """kill -9 of one member at any point of a step; it is started again by whoever does that on this side."""
    pids = side.commits.wait_until_steady(MOST_MEMBERS, STEADY_S, side.alive)
    victim = chance.choice(pids)
    _wait_within_step(side, chance)
    at = processes.send(victim, signal.SIGKILL)
    figures = _recovery(side, at, pids, victim)
    figures["back_s"] = _first_contribution(side, at, pids).at - at
    return figures


def hang(side: Side, chance: random.Random) -> Figures:
    """SIGSTOP of one member, and SIGCONT once the others go on."""
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
    """SIGTERM to one member: how long until it is gone, and what it cost the others."""
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
    """A member and whatever keeps it running are taken away at once and for good."""
    pids = side.commits.wait_until_steady(MOST_MEMBERS, STEADY_S, side.alive)
    victim = chance.choice([pid for pid in pids if side.can_lose(pid)])
    _wait_within_step(side, chance)
    at = time.monotonic()
    side.remove(victim)
    return _recovery(side, at, pids, victim)


def join(side: Side, chance: random.Random) -> Figures:
    """One member is added to two that train; what the two feel, and when the third contributes."""
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
    """The coordinator is killed with -9 and is back after `down_s`."""
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
    """Sleeps so that what follows falls on any point of any of ten steps with equal chance."""
    commits = side.commits.refresh()
    time.sleep(chance.random() * 10 * max(0.01, step_time_s(commits[-30:])))


def _recovery(side: Side, at: float, pids: list[int], victim: int) -> Figures:
    """From the fault to the first step committed without the victim."""
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
    """The first step that a process which was not there before added samples to."""
    return side.commits.wait_for(
        lambda commit: commit.pid not in pids and commit.samples > 0 and commit.size == MOST_MEMBERS,
        at,
        RECOVERY_S,
        side.alive,
    )


def _stall_s(side: Side, at: float, event: float, others: list[int], since: float = 0.0) -> float:
    """The longest wait for a commit that ended between `since` and `event`, beyond the usual time of a step.

    It is that of the processes in `others`; or the whole job's, if none of them lived to see the event.
    """
    usual_s = step_time_s(side.commits.before(at)[-60:])
    around = [commit for commit in side.commits.after(at - 3 * usual_s) if commit.at <= event + max(0.1, usual_s)]
    lasting = {commit.pid for commit in around if commit.at >= event} & set(others)
    return max(0.0, longest_gap_s(around, lasting, since=max(at, since)) - usual_s)
