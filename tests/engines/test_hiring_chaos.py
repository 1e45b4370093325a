"""Coordinator, agents and members die at random, also while machines are hired: nothing is left, nothing is lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from test_hiring import Hired, hired, pool

pytestmark = [pytest.mark.chaos, pytest.mark.process, pytest.mark.timeout(900)]

FAULTS = int(os.environ.get("SHOAL_HIRING_FAULTS", "15"))
STEPS = 100_000


def hurt(run: Hired, dice: random.Random) -> str:
    kind = dice.choices(["agent", "coordinator", "both", "member", "freeze"], [6, 4, 2, 4, 1])[0]
    agents, members = list(run.agents().values()), list(run.pids().values())
    with contextlib.suppress(StopIteration, psutil.NoSuchProcess, ProcessLookupError):
        if kind in ("coordinator", "both"):
            run.helper("coordinator").kill()
        if kind in ("agent", "both") and agents:
            dice.choice(agents).kill()
        if kind == "member" and members:
            os.kill(dice.choice(members), signal.SIGKILL)
        if kind == "freeze" and agents:
            frozen = dice.choice(agents)
            frozen.suspend()
            time.sleep(dice.uniform(0.5, 3.0))
            frozen.resume()
    return kind


def test_random_crashes_leave_nothing_behind(tmp_path: Path) -> None:
    seed = int(os.environ.get("SHOAL_STRESS_SEED", str(random.SystemRandom().randrange(10**6))))
    print("seed", seed)
    dice = random.Random(seed)
    pools = pool("spot", 2) + pool("lab", 2)
    with hired(tmp_path, "spot,lab", "1:3", pools, "orphan_s=10", "budget.infrastructure=100000", steps=STEPS) as run:
        run.until_size(3)
        for number in range(FAULTS):
            step = run.step()
            print(number, hurt(run, dice), flush=True)
            time.sleep(dice.uniform(0.0, 4.0))
            # The supervisor gives up on a coordinator that dies again and again within seconds, and rightly so.
            run.until(lambda before=step: run.step() > before, "another step", patience_s=180.0)
        run.until_size(3)
        assert len(run.agents()) == 3, "three machines are enough for three members"
        assert run.agents().keys() == {one["agent"]["agent"] for one in run.shoal("nodes") if one["agent"]["connected"]}
        commits = run.commits()
        assert {e["step"] for e in commits} == set(range(1, max(e["step"] for e in commits) + 1)), "a step was lost"
        run.process.send_signal(dice.choice([signal.SIGKILL, signal.SIGTERM]))
        run.check_leftovers(within_s=90.0)
