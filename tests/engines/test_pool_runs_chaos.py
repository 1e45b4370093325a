"""Random deaths of coordinator, agents, members and clients, also during allocations: nothing is left or lost.

SHOAL_POOL_RUNS_FAULTS is the number of deaths, SHOAL_POOL_RUNS_ENGINE is local or slurm, and SHOAL_POOL_RUNS_REPORT is
the file for a report of what died and what was left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.engines import slurm_cluster
from tests.engines.test_pool_runs import PoolRun, pool, pool_run

pytestmark = [pytest.mark.chaos, pytest.mark.process, pytest.mark.timeout(1500)]

FAULTS = int(os.environ.get("SHOAL_POOL_RUNS_FAULTS", "15"))
ENGINE = os.environ.get("SHOAL_POOL_RUNS_ENGINE", "local")
REPORT = os.environ.get("SHOAL_POOL_RUNS_REPORT", "")
PER_RUN = 15
STEPS = 100_000
GONE_WITHIN_S = 90.0


def hurt(run: PoolRun, dice: random.Random) -> str:
    kind = dice.choices(["agent", "coordinator", "both", "member", "freeze"], [6, 4, 2, 4, 1])[0]
    agents, members = list(run.agents().values()), list(run.pids().values())
    with contextlib.suppress(StopIteration, psutil.NoSuchProcess, ProcessLookupError):
        if kind in ("coordinator", "both"):
            run.service_process("coordinator").kill()
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


@contextlib.contextmanager
def machines(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Callable[[], int]]]:
    """Yield two pools, and a function that counts their jobs."""
    pools = pool("spot", 2) + pool("lab", 2)
    if ENGINE == "local":
        yield pools, lambda: 0
        return
    if why := slurm_cluster.missing():
        pytest.skip(f"Slurm: {why}")
    cluster = slurm_cluster.Cluster(path / "slurm")
    try:
        cluster.start()
        monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
        monkeypatch.setenv("PATH", slurm_cluster.PATH)
        states = "--states=PENDING,CONFIGURING,RUNNING,SUSPENDED,COMPLETING"
        yield pools.replace('"local"', '"slurm"'), lambda: len(cluster.ask("squeue", "-h", states).stdout.splitlines())
    finally:
        cluster.stop()


def is_settled(run: PoolRun) -> bool:
    agents = run.agents()
    known = {one["agent"]["agent"] for one in run.shoal("nodes") if one["agent"]["connected"]}
    return run.world_size() == 3 == len(agents) and agents.keys() == known


def outlive(run: PoolRun, dice: random.Random, faults: int) -> Counter[str]:
    """Kill that many processes, the client last; return what was killed."""
    died: Counter[str] = Counter()
    run.until_size(3)
    for number in range(faults - 1):
        step = run.step()
        kind = hurt(run, dice)
        died[kind] += 1
        print(number, kind, flush=True)
        time.sleep(dice.uniform(0.0, 4.0))
        # The supervisor gives up on a coordinator that dies again and again within seconds, and rightly so.
        run.until(lambda before=step: run.step() > before, "another step", timeout_s=180.0)
    run.until(lambda: is_settled(run), "three machines, and no more, for three members", timeout_s=180.0)
    commits = run.commits()
    assert {e["step"] for e in commits} == set(range(1, max(e["step"] for e in commits) + 1)), "a step was lost"
    run.process.send_signal(dice.choice([signal.SIGKILL, signal.SIGTERM]))
    died["client"] += 1
    return died


def left_of(run: PoolRun, jobs: Callable[[], int]) -> tuple[int, int]:
    """Return the processes and jobs of a run that outlive their limit."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while (left := (len(run.agents()) + len(run.living()), jobs())) != (0, 0) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def test_random_crashes_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = int(os.environ.get("SHOAL_STRESS_SEED", "1"))
    print("seed", seed)
    dice, died, left = random.Random(seed), Counter[str](), []
    settings = ("orphan_timeout_s=10", "restarts.infrastructure=100000", "host=127.0.0.1")
    with machines(tmp_path, monkeypatch) as (pools, jobs):
        while died.total() < FAULTS:
            home = tmp_path / f"after-{died.total()}"
            home.mkdir()
            with pool_run(home, "spot,lab", "1:3", pools, *settings, steps=STEPS) as run:
                died += outlive(run, dice, min(PER_RUN, FAULTS - died.total()))
                left.append(left_of(run, jobs))
            if REPORT:
                found = {"died": died, "processes": sum(one for one, _ in left), "jobs": sum(one for _, one in left)}
                Path(REPORT).write_text(json.dumps({**found, "seed": seed}))
            assert left[-1] == (0, 0), f"processes and jobs left behind: {left[-1]}\n{run.output[-3000:]}"
