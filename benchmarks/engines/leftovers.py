"""Leftovers of runs on pools whose coordinators, agents, members and clients were killed at random."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

from benchmarks.engines.sites import SOURCES
from benchmarks.processes import ROOT
from benchmarks.rounds import say

TEST = "tests/engines/test_pool_runs_chaos.py"
ENGINES = ("local", "slurm")
EACH_S = 20.0
MORE_S = 120.0


def count(engine: str, faults: int) -> dict[str, Any]:
    """Run the chaos test with so many faults on this engine and return the processes and jobs that are left over."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-", dir="/tmp") as scratch:
        report = Path(scratch, "report.json")
        env = {
            **os.environ,
            "PYTHONPATH": f"{SOURCES}{os.pathsep}{ROOT}",
            "SHOAL_POOL_RUNS_FAULTS": str(faults),
            "SHOAL_POOL_RUNS_ENGINE": engine,
            "SHOAL_POOL_RUNS_REPORT": str(report),
        }
        argv = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rs",
            "-p",
            "no:cacheprovider",
            f"--basetemp={scratch}/tests",
            TEST,
        ]
        with Path(scratch, "out").open("w+") as out:
            code = _run(argv, env, out, faults * EACH_S + MORE_S)
            out.seek(0)
            said = out.read()
        told: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {"died": {}}
    died = told["died"]
    found = {"engine": engine, "crashes": _crashes(died), "told": _told(died), **told}
    if code != 0 or not died:
        found["failed"] = "".join(said.strip().splitlines()[-1:]) if code is not None else "it did not end"
        say(said[-3000:])
    say(f"leftovers, {engine}: {found}")
    return found


def _run(argv: list[str], env: dict[str, str], out: TextIO, within_s: float) -> int | None:
    """Return the exit code of the test, or None if it had to be killed; its descendants end with it."""
    try:
        return subprocess.run(argv, cwd=ROOT, env=env, stdout=out, stderr=out, timeout=within_s, check=False).returncode
    except subprocess.TimeoutExpired:
        return None


def _crashes(died: dict[str, int]) -> int:
    """Return the number of crashes of coordinators, agents and clients, without killed members and frozen agents."""
    return sum(
        {"agent": 1, "coordinator": 1, "both": 2, "client": 1}.get(kind, 0) * many for kind, many in died.items()
    )


def _told(died: dict[str, int]) -> str:
    return ", ".join(f"{many} {kind}" for kind, many in sorted(died.items()))
