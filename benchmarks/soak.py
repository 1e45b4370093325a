"""What a run of two members uses as time goes by: journal, views, memory and descriptors, per hour.

python -m benchmarks.soak [--minutes 20] [--out FILE]        results/soak.{json,md}

`shoal run -n 2` trains with default settings. Every ten seconds the sizes of its files are noted, and the resident
memory and the descriptors of the command, the coordinator, the agent and each member. The slope of a straight line
through the figures after the warm-up is scaled to an hour; a busy machine makes the run slower, not larger.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil

from benchmarks import machine
from benchmarks.journal import SCRIPT

RESULTS = Path(__file__).parent / "results"
EVERY_S = 10.0
WARM_UP = 0.3
START_S = 600.0
GOALS = {"journal MB": 0.3, "memory MB": 2.0, "descriptors": 1.0}
Sample = dict[str, float]


def slopes(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return by how much each figure grows an hour, after the warm-up.

    >>> slopes([{"at": 360.0 * i, "x": 5.0 + 2 * i} for i in range(10)])
    {'x': 20.0}
    """
    kept = samples[int(WARM_UP * len(samples)) :]
    hours = np.array([sample["at"] for sample in kept]) / 3600.0
    names = [name for name in kept[-1] if name != "at" and all(name in sample for sample in kept)]
    return {name: round(float(np.polyfit(hours, [sample[name] for sample in kept], 1)[0]), 3) + 0.0 for name in names}


def soak(minutes: float) -> list[Sample]:
    """Return the figures of a run of two members, from its first step on."""
    with tempfile.TemporaryDirectory(prefix="shoal-soak-") as scratch:
        script, home = Path(scratch) / "train.py", Path(scratch) / "home"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "shoal.cli.main", "run", "-n", "2", str(script)]
        with (Path(scratch) / "output").open("wb") as output:
            environ = {**os.environ, "SHOAL_HOME": str(home)}
            run = subprocess.Popen(command, cwd=scratch, env=environ, stdout=output, stderr=output)
        try:
            directory = _await_members(run, home)
            began, samples = time.monotonic(), []
            while (now := time.monotonic() - began) < 60.0 * minutes:
                samples.append({"at": now, **_sizes(directory), **_processes(run, directory)})
                if run.poll() is not None:
                    raise RuntimeError("the run ended")
                time.sleep(EVERY_S)
        finally:
            run.terminate()
            run.wait(60.0)
    return samples


def _await_members(run: subprocess.Popen[bytes], home: Path) -> Path:
    """Block until two members train; return the coordinator's directory."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and run.poll() is None:
        for journal in home.glob("coordinators/*/journal.jsonl"):
            if b'"ProgressRecorded"' in journal.read_bytes():
                return journal.parent
        time.sleep(0.5)
    raise RuntimeError(f"the run did not train within {START_S:g} s")


def _sizes(directory: Path) -> Sample:
    views = sum(file.stat().st_size for file in directory.glob("views.sqlite*"))
    reports = sum(file.stat().st_size for file in directory.glob("runs/*/tensorboard/**/*") if file.is_file())
    logs = sum(file.stat().st_size for file in (*directory.glob("*.log"), *directory.glob("logs/**/*.log")))
    sizes = {"journal": (directory / "journal.jsonl").stat().st_size, "views": views, "reports": reports, "logs": logs}
    return {f"{name} MB": size / 1e6 for name, size in sizes.items()}


def _processes(run: subprocess.Popen[bytes], directory: Path) -> Sample:
    """Return the memory and descriptors of the command, the coordinator, the agent and the members."""
    processes = {"command": psutil.Process(run.pid)}
    for child in psutil.Process(run.pid).children():
        command_line = " ".join(child.cmdline())
        processes |= {word: child for word in ("coordinator", "agent") if f"shoal.{word}" in command_line}
    for line in (directory / "journal.jsonl").read_bytes().splitlines():
        if b'"ProcessStarted"' in line:
            fields = json.loads(line)["fields"]
            processes[fields["member"]] = psutil.Process(fields["pid"])
    figures: Sample = {}
    for name, process in processes.items():
        figures[f"memory MB of {name}"] = process.memory_info().rss / 1e6
        figures[f"descriptors of {name}"] = float(process.num_fds())
    return figures


def table(figures: Mapping[str, float], last: Mapping[str, float], minutes: float) -> str:
    rows = []
    for name, slope in figures.items():
        goal = next((limit for start, limit in GOALS.items() if name.startswith(start)), None)
        rows.append(f"| {name} | {last[name]:.3g} | {slope:+.3g} | {'' if goal is None else f'≤ {goal:g}'} |")
    on = machine.describe()
    lines = [
        f"# A run of two members, {minutes:g} minutes",
        "",
        "| | at the end | per hour | goal |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
        "The slope is that of a straight line after the warm-up. `views` keeps at most 7,200 measurements of a run: it",
        "stops growing after two hours. `reports` are TensorBoard files.",
        "",
        f"Measured by `python -m benchmarks.soak` on {on['cpu']}, Python {on['python']}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "soak.json")
    options = parser.parse_args()
    samples = soak(options.minutes)
    figures, last = slopes(samples), samples[-1]
    options.out.write_text(json.dumps({"minutes": options.minutes, "per_hour": figures, "last": last}, indent=2) + "\n")
    options.out.with_suffix(".md").write_text(table(figures, last, options.minutes))
    print(table(figures, last, options.minutes))


if __name__ == "__main__":
    main()
