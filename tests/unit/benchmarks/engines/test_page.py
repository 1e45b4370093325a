"""Table of the engines benchmark: medians, spreads, and whether goals are met."""

from __future__ import annotations

from typing import Any

from benchmarks.engines.page import page

MACHINE = {"cpu": "some", "cores": 2, "memory_gib": 8, "python": "3.11", "torch": "2.13", "load_before": 0.1}
PART = {"machine": MACHINE, "began": "2026-11-16 12:00"}


def row(results: dict[str, Any], figure: str) -> list[str]:
    line = next(line for line in page(results).splitlines() if line.startswith(f"| {figure}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def starts(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    sides = {"shoal": ours, "srun torchrun": theirs}
    runs = {name: [{"first_step_s": seconds} for seconds in values] for name, values in sides.items()}
    return {"start": {**PART, "sites": {"slurm": runs}}}


def test_start_sooner_than_the_engines_own_meets_its_goal():
    _, ours, theirs, goal, met = row(starts([3.0, 9.0, 4.0], [5.0, 4.0, 6.0]), "submit → first step, Slurm")
    assert (ours, theirs) == ("4.00 s (3.00-9.00)", "srun torchrun: 5.00 s (4.00-6.00)")
    assert (goal, met) == ("0.8 x (≤ 1)", "yes")


def test_later_start_misses_its_goal():
    assert row(starts([5.1], [5.0]), "submit → first step, Slurm")[-1] == "**no**"


def test_lost_step_misses_the_goal_and_a_job_that_never_recovered_is_counted():
    sides = {
        "shoal": [{"recovery_s": 0.1, "lost_steps": 0}, {"recovery_s": 0.2, "lost_steps": 1}],
        "Ray Train": [{"recovery_s": 9.0, "lost_steps": 7}, {"failed": "no such commit in 150 s"}],
    }
    results = {"loss": {**PART, "sites": {"ray": sides}}}
    assert row(results, "node loss → next commit, Ray")[2] == "Ray Train: 9.00 s (9.00-9.00); 1 of 2 never"
    assert row(results, "node loss → next commit, Ray")[-1] == "yes"
    assert row(results, "… steps lost")[-1] == "**no**"


def test_remaining_process_misses_the_goal():
    leftovers = {"engine": "slurm", "crashes": 50, "told": "50 agent", "processes": 1, "jobs": 0}
    results = {"leftovers": {**PART, "rounds": [leftovers]}}
    assert row(results, "left after 50 crashes")[1] == "1 processes, 0 jobs"
    assert row(results, "left after 50 crashes")[-1] == "**no**"
