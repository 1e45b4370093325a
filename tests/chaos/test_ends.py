"""Training loops that end in every way, at random steps and beside random faults: no run hangs, no state differs.

`SHOAL_ENDS` is the number of runs, `SHOAL_ENDS_SEED` repeats a series, `SHOAL_ENDS_LOAD` is a number of busy loops
beside them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.testing.run_under_test import RunUnderTest, closing

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(7200)]

RUNS = int(os.environ.get("SHOAL_ENDS", "4"))
LOAD = int(os.environ.get("SHOAL_ENDS_LOAD", "2"))
HUNG_S = 120.0
SCRIPT = Path(__file__).with_name("ends_train.py")


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def random_plan(dice: random.Random) -> dict[str, Any]:
    end = dice.choice(["break", "break", "return", "exit", "natural", "raise"])
    who = dice.choice(["all", "all", "all", "local/0", "local/1"])
    epochs = dice.randrange(2, 5)
    return {
        "end": end,
        "who": who,
        "epochs": epochs,
        "at": dice.choice([0, 1, dice.randrange(8 * epochs), 8 * epochs - 1]),
        "width": dice.choice([32, 32, 60_000]),
        "members": dice.choice(["1:2", "2", "2:3", "3", "1:3"]),
        "fault": dice.choice(["none", "none", "kill", "notice", "scale"]),
    }


def hurt(run: RunUnderTest, plan: dict[str, Any], dice: random.Random) -> None:
    """Inject the plan's fault at a random step, if the run lives that long."""
    step = dice.randrange(plan["at"] + 1)
    deadline = time.monotonic() + HUNG_S
    while run.process.poll() is None and run.step() < step and time.monotonic() < deadline:
        time.sleep(0.01)
    if run.process.poll() is not None or plan["fault"] == "none":
        return
    if plan["fault"] == "scale":
        with contextlib.suppress(AssertionError):  # it has just ended
            run.shoal("scale", run.name, "1:4")
        return
    if members := run.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(dice.choice(sorted(members.values())), 9 if plan["fault"] == "kill" else 15)


def check_end(run: RunUnderTest, plan: dict[str, Any]) -> None:
    """Fail unless the run ended as its plan says and all that finished at one step hold one state."""
    code = run.process.poll()
    assert code is not None, f"hung: {plan}\n{run.output[-3000:]}"
    sums: dict[int, set[str]] = {}
    for event in run.events_of("done"):
        sums.setdefault(event["step"], set()).add(event["sum"])
    assert all(len(values) == 1 for values in sums.values()), f"members differ: {plan} {sums}"
    may_fail = plan["end"] == "raise"
    assert code == 0 or may_fail, f"exit code {code}: {plan}\n{run.output[-3000:]}"
    if code == 0:
        assert sums, f"no member finished: {plan}\n{run.output[-3000:]}"


def test_loops_that_end_in_any_way_never_hang_or_diverge(tmp_path: Path) -> None:
    seed = int(os.environ.get("SHOAL_ENDS_SEED", "901"))
    with busy_loops(LOAD):
        for number in range(RUNS):
            dice = random.Random(seed + number)
            plan = random_plan(dice)
            print("seed", seed + number, plan, flush=True)
            environ = {"ENDS": json.dumps(plan)}
            with closing(RunUnderTest(tmp_path / str(number), SCRIPT, plan["members"], (), environ)) as run:
                hurt(run, plan, dice)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.process.wait(HUNG_S)
                check_end(run, plan)
