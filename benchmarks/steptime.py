"""Step time and memory against plain DDP: all jobs are alive at once and take turns, block by block."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import processes
from benchmarks.commits import TimedOutError, gaps_s
from benchmarks.sides.side import Load, Side

MEMBERS = 2
WARM_UP_STEPS = 10
BLOCK_S = 300.0


def compare(
    sides: Sequence[type[Side]], model: str, batch: int, blocks: int, steps: int, scratch: Path
) -> dict[str, Any]:
    """Return the median step time of every block and the memory of a member after the last, by side."""
    jobs: list[Side] = []
    try:
        for kind in sides:
            directory = scratch / f"steps-{model}-{kind.name}"
            directory.mkdir()
            job = kind(directory, Load(model=model, batch=batch, gated=True))
            _open_gate(job, WARM_UP_STEPS)
            jobs.append(job)
            job.start(MEMBERS)
            _wait_for_step(job, WARM_UP_STEPS - 1)
        medians: dict[str, list[float]] = {job.name: [] for job in jobs}
        for block in range(blocks):
            for job in jobs if block % 2 == 0 else reversed(jobs):
                medians[job.name].append(_block_s(job, WARM_UP_STEPS + block * steps, steps))
        memory = {job.name: _memory(job) for job in jobs}
    finally:
        for job in jobs:
            job.end()
    return {"model": model, "batch": batch, "steps_a_block": steps, "step_s": medians, "memory": memory}


def _block_s(job: Side, first: int, steps: int) -> float:
    _open_gate(job, first + steps)
    _wait_for_step(job, first + steps - 1)
    return median(gaps_s([commit for commit in job.commits.refresh() if first <= commit.step < first + steps]))


def _open_gate(job: Side, step: int) -> None:
    part = job.directory / "gate.part"
    part.write_text(str(step))
    part.rename(job.directory / "gate")


def _wait_for_step(job: Side, step: int) -> None:
    ends = time.monotonic() + BLOCK_S
    while time.monotonic() < ends and job.alive():
        if len({commit.pid for commit in job.commits.refresh() if commit.step == step and commit.samples}) == MEMBERS:
            return
        time.sleep(0.05)
    raise TimedOutError(f"{job.name} did not reach step {step}")


def _memory(job: Side) -> dict[str, float]:
    """Return the medians over the job's members and the memory of the whole job per member."""
    pids = {commit.pid for commit in job.commits.refresh()[-4 * MEMBERS :]}
    members = [processes.memory_bytes(pid) for pid in pids]
    medians = {f"{kind}_bytes": median(member[kind] for member in members) for kind in members[0]}
    whole = sum(processes.memory_bytes(pid)["pss"] for pid in processes.below(job.processes()))
    return {**medians, "whole_job_pss_bytes": whole / MEMBERS}
