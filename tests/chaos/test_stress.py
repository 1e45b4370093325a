"""Two hundred random faults in one run, after which all members hold the same parameters and no sample is lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.process.faults.checked_run import CheckedRun, checked_run

from shoal.store import checkpoint
from shoal.store.blob_store import open_store
from shoal.torch.state import capture as state

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1500)]

FAULTS = int(os.environ.get("SHOAL_STRESS_FAULTS", "200"))
LIMIT_S = 1200.0
REST_S = 8.0


def coordinator_born_at(run: CheckedRun) -> float:
    with contextlib.suppress(StopIteration):
        return time.monotonic() - (time.time() - run.service_process("coordinator").create_time())
    return time.monotonic()


def hurt(run: CheckedRun, dice: random.Random, doomed: set[int], stopped: list[tuple[float, int]]) -> bool:
    """Inject one fault, if the run can bear it; spare one member of the newest world. Return whether it did."""
    alive = {name: pid for name, pid in run.pids().items() if pid not in doomed}
    newest = max((c["world"] for c in run.commits()), default=0)
    holders = {c["pid"] for c in run.commits()[-40:] if c["world"] == newest} & set(alive.values())
    kind = dice.choices(["kill", "two", "stop", "notice", "coordinator"], [10, 2, 2, 4, 1])[0]
    if kind == "coordinator" and time.monotonic() - coordinator_born_at(run) < REST_S:
        return False  # a coordinator that keeps dying ends the run
    if kind == "coordinator":
        with contextlib.suppress(StopIteration):  # it is being started again
            run.service_process("coordinator").kill()
            return True
        return False
    if len(holders) < (3 if kind == "two" else 2):
        return False
    for pid in dice.sample(sorted(alive.values()), 2 if kind == "two" else 1):
        doomed.add(pid)
        os.kill(pid, {"stop": signal.SIGSTOP, "notice": signal.SIGTERM}.get(kind, signal.SIGKILL))
        if kind == "stop":
            stopped.append((time.monotonic() + dice.uniform(0.5, 4.0), pid))
    return True


def wake(doomed: set[int], stopped: list[tuple[float, int]], all_members: bool = False) -> None:
    for item in list(stopped):
        if all_members or time.monotonic() > item[0]:
            stopped.remove(item)
            with contextlib.suppress(ProcessLookupError):
                os.kill(item[1], signal.SIGCONT)
                doomed.discard(item[1])


def test_two_hundred_random_faults_lose_and_repeat_nothing(tmp_path: Path) -> None:
    seed = int(os.environ.get("SHOAL_STRESS_SEED", "1"))
    print("seed", seed)
    dice = random.Random(seed)
    settings = ("lease_s=2", "restarts.infrastructure=100000", "backoff_s=0.05", "backoff_max_s=0.2")
    with checked_run(tmp_path, "1:4", settings, pause_s=0.01, epochs=100_000, samples=500) as run:
        run.until_size(4)
        done, doomed, stopped = 0, set(), []
        deadline = time.monotonic() + LIMIT_S
        while done < FAULTS and time.monotonic() < deadline and run.process.poll() is None:
            done += hurt(run, dice, doomed, stopped)
            time.sleep(dice.uniform(0.05, 0.6))
            wake(doomed, stopped)
        wake(doomed, stopped, all_members=True)
        assert run.process.poll() is None, run.output[-6000:]
        assert done == FAULTS, f"only {done} faults in {LIMIT_S:.0f} s"
        run.shoal("stop", run.shoal("ps")[0]["run"])
        run.finish(exit_code=75)
        check_all(run)
        print(f"{done} faults, {run.step() + 1} steps, {len({c['world'] for c in run.commits()})} worlds")


def check_all(run: CheckedRun) -> None:
    """Fail unless the last checkpoint holds the parameters of one undisturbed member after the same steps."""
    saved = checkpoint.read(open_store(str(next(run.home.glob("coordinators/*/runs/*/checkpoints")))))
    steps = saved.entry.step
    assert steps == run.step() + 1
    run.check_steps(steps)
    run.check_parameters(state.read(saved.header, saved.buffers)["model"], steps)
