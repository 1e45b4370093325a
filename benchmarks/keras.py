"""`python -m benchmarks.keras`: Keras' step time against MultiWorkerMirroredStrategy, and the cost of kill -9."""

from __future__ import annotations

import argparse
import json
import random
import signal
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import faults, machine, processes, steptime
from benchmarks.sides.keras import Backup, KerasShoal, MultiWorkerMirrored
from benchmarks.sides.shoal import ShoalOnOneMachine
from benchmarks.sides.side import MOST_MEMBERS, Load, Side

RESULTS = Path(__file__).parent / "results"
FAST_S = 0.02
WAIT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "keras.json")
    options = parser.parse_args()
    processes.adopt_orphans()
    found: dict[str, Any] = {
        "machine": machine.describe(),
        "began": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "steps": [],
        "kills": {},
    }
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        try:
            for model, batch, steps in (("cnn", 64, 40), ("wide", 32, 12)):
                sides = (MultiWorkerMirrored, KerasShoal)
                found["steps"].append(steptime.compare(sides, model, batch, options.blocks, steps, Path(scratch)))
                print(f"{model}: {found['steps'][-1]['step_s']}", flush=True)
            for kind in (KerasShoal, ShoalOnOneMachine):
                found["kills"][kind.name] = _kills(kind, options.kills, Path(scratch))
            found["kills"][Backup.name] = _restarts(max(2, options.kills // 2), Path(scratch))
        finally:
            processes.end_all()
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    text = render(found)
    options.out.with_suffix(".md").write_text(text)
    print(text)


def _kills(kind: type[Side], times: int, scratch: Path) -> list[float]:
    """Return the seconds from kill -9 of one of three members to the next commit."""
    directory = scratch / f"kills-{kind.name.replace(' ', '-')}"
    directory.mkdir()
    side, chance, found = kind(directory, Load(pace_s=FAST_S)), random.Random(1), []
    try:
        side.start(MOST_MEMBERS)
        for _ in range(times):
            found.append(faults.crash(side, chance)["recovery_s"])
            print(f"{kind.name}: kill -9 → commit {found[-1]:.3f} s", flush=True)
    finally:
        side.end()
    return found


def _restarts(times: int, scratch: Path) -> list[float]:
    directory = scratch / "backup"
    directory.mkdir()
    side, found = Backup(directory, Load(pace_s=FAST_S)), []
    try:
        side.start(1)
        for _ in range(times):
            pid = side.commits.wait_for(lambda commit: commit.step > 60, 0.0, WAIT_S, side.alive).pid
            pid = side.commits.refresh()[-1].pid or pid
            time.sleep(1.0)
            at = processes.send(pid, signal.SIGKILL)
            first = side.commits.wait_for(lambda commit, pid=pid: commit.pid != pid, at, WAIT_S, side.alive)
            found.append(first.at - at)
            print(f"{side.name}: kill -9 → commit {found[-1]:.3f} s", flush=True)
    finally:
        side.end()
    return found


def render(found: dict[str, Any]) -> str:
    """Return the figures as a table of goals."""
    about = found["machine"]
    lines = [
        f"# Keras, {found['began']} UTC",
        "",
        f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB; load before: {about['load_before']}.",
        "",
        "| figure | found | goal | met |",
        "| --- | --- | --- | --- |",
    ]
    for one in found["steps"]:
        ours, theirs = (median(one["step_s"][name]) for name in (KerasShoal.name, MultiWorkerMirrored.name))
        ratio = ours / theirs
        told = f"{ours * 1e3:.1f} ms; MultiWorkerMirroredStrategy {theirs * 1e3:.1f} ms: {ratio:.3f} x"
        lines.append(f"| step time, {one['model']} | {told} | ≤ 1.05 x | {_met(ratio <= 1.05)} |")
    kills = {name: median(values) for name, values in found["kills"].items()}
    ours, torch, backup = (kills[name] for name in (KerasShoal.name, ShoalOnOneMachine.name, Backup.name))
    lines += [
        f"| kill -9 → next commit, over Shoal's for PyTorch | {ours:.3f} s over {torch:.3f} s: {ours / torch:.2f} x "
        f"| ≤ 1.2 x | {_met(ours / torch <= 1.2)} |",
        f"| kill -9 → next commit, over restart and BackupAndRestore | {ours:.3f} s over {backup:.1f} s: "
        f"{ours / backup:.4f} x | ≤ 0.05 x | {_met(ours / backup <= 0.05)} |",
    ]
    return "\n".join([*lines, ""])


def _met(yes: bool) -> str:
    return "yes" if yes else "**no**"


if __name__ == "__main__":
    main()
