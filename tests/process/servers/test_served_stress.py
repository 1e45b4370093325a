"""Trainers, servers and the coordinator die at random: the bound holds, and each shard has each sample once an epoch.

A server is killed only while every part has a backup: losing both copies at once is losing the state, and is tested
with the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.process.servers.served_run import ServedRun, served_run

pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.timeout(600)]

FAULTS = int(os.environ.get("SHOAL_SERVED_FAULTS", "12"))
CALM = ("lease_s=2", "restarts.infrastructure=100000", "backoff_s=0.05", "backoff_max_s=0.2", "reconnect_s=2")


def hurt(run: ServedRun, dice: random.Random, stopped: list[tuple[float, int]]) -> bool:
    """Inject one fault, if the run can bear it; return whether it did."""
    kind = dice.choices(["trainer", "server", "notice", "stop", "hang", "coordinator"], [8, 5, 2, 2, 2, 1])[0]
    if kind == "coordinator":
        with contextlib.suppress(StopIteration):
            helper = run.service_process("coordinator")
            if time.time() - helper.create_time() > 8.0:
                helper.kill()
                return True
        return False
    if kind in ("server", "hang"):
        hanging = {pid for _, pid in stopped} & {run.pids()[name] for name in run.servers()}
        names = run.servers() if run.replicated() and not hanging else []
    else:
        names = run.trainers()
        if len(names) < 2:
            return False
    if not names:
        return False
    pid = run.pids()[dice.choice(names)]
    with contextlib.suppress(ProcessLookupError):
        signals = {"notice": signal.SIGTERM, "stop": signal.SIGSTOP, "hang": signal.SIGSTOP}
        os.kill(pid, signals.get(kind, signal.SIGKILL))
        if kind in ("stop", "hang"):
            stopped.append((time.monotonic() + dice.uniform(0.5, 4.0), pid))
        return True
    return False


def wake(stopped: list[tuple[float, int]], all_members: bool = False) -> None:
    for item in list(stopped):
        if all_members or time.monotonic() > item[0]:
            stopped.remove(item)
            with contextlib.suppress(ProcessLookupError):
                os.kill(item[1], signal.SIGCONT)


@pytest.mark.parametrize("sync", ["stale:2", "stale:0", "async"])
def test_random_deaths_keep_the_bound_and_cost_no_sample(tmp_path: Path, sync: str) -> None:
    seed = int(os.environ.get("SHOAL_STRESS_SEED", "1"))
    print("seed", seed)
    dice = random.Random(seed)
    epochs = 10 * FAULTS
    slow = {"local/2": 0.02}
    with served_run(tmp_path, "1:3", sync, *CALM, pause_s=0.01, slow=slow, epochs=epochs, samples=256, lr=0.02) as run:
        run.until_step(3)
        done, stopped = 0, []
        deadline = time.monotonic() + 400
        while done < FAULTS and time.monotonic() < deadline and run.process.poll() is None:
            done += hurt(run, dice, stopped)
            time.sleep(dice.uniform(0.1, 0.8))
            wake(stopped)
        wake(stopped, all_members=True)
        assert done >= FAULTS // 2, f"only {done} faults before the run ended:\n{run.output[-3000:]}"
        run.finish(timeout_s=180)
        run.check_counts()
        if sync.startswith("stale:"):
            bound = int(sync.partition(":")[2])
            print("at most", run.check_bound(bound), "ahead after", done, "faults")
        assert run.loss() < 0.5, "the loss did not fall"
