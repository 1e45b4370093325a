"""Figures of one job: time to its first step, and cost of a lost machine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.commits import Commit, TimedOutError, step_time_s, steps_lost
from benchmarks.engines.sides import Side
from benchmarks.sides.side import Load

MEMBERS = 2
MACHINES = 3
FAST_S = 0.02
WAIT_S = 150.0
Figures = dict[str, float]


def first_step(side: Side[Any], directory: Path) -> Figures:
    """Return the seconds from the command to the first step that all members committed together."""
    try:
        at = side.start(directory, Load(), MEMBERS, MEMBERS)
        first = side.commits.wait_for(lambda commit: commit.size == MEMBERS, at, WAIT_S, side.alive)
        return {"first_step_s": first.at - at}
    finally:
        side.end()


def loss(side: Side[Any], directory: Path, chance: random.Random) -> Figures:
    """Lose one of three machines within a step; return the seconds to the next commit and the repeated steps."""
    try:
        side.start(directory, Load(pace_s=FAST_S), MACHINES - 1, MACHINES)
        before = side.commits.wait_until_steady(MACHINES, WAIT_S, side.alive)
        victim = chance.choice([one for one in side.site.training(directory) if side.can_lose(one)])
        time.sleep(chance.random() * 10 * FAST_S)
        at = side.site.lose(victim)
        first = side.commits.wait_for(_of_another_world(side.commits.before(at)[-1]), at, WAIT_S, side.alive)
        known = side.commits.before(at)
        if not {commit.pid for commit in known[-MACHINES * 2 :]} <= set(before):
            raise TimedOutError("the job changed by itself before a machine was lost")
        return {
            "recovery_s": first.at - at,
            "lost_steps": steps_lost(known, [first]),
            "step_s": step_time_s(known[-60:]),
        }
    finally:
        side.end()


def _of_another_world(last: Commit) -> Callable[[Commit], bool]:
    return lambda commit: commit.world != last.world
