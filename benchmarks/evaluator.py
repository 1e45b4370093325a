"""What an evaluator on its own core costs the trainers: step time with and without it, as ratios of one repetition.

python -m benchmarks.evaluator [--quick] [--json FILE]

One trainer has the first core, the evaluator the last one; it scores for most of the time. Checkpoints are written
every few seconds, more often than is usual, and are measured by themselves too. Sides take turns, so that whatever else
the machine does hits all of them; the trainer's CPU time says what remains on a machine that is not quiet. `shared`
leaves it to the system which core each of them gets. At last, within one run, the evaluator is stopped and let go on in
turns of a few seconds, which shows its own part even where the machine's mood changes from run to run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

SCRIPT = Path(__file__).with_name("scripts") / "evaluated.py"
EVERY_S = 5.0
WARM_UP_S = 3.0
GOAL = 1.03
TURN_S = 2.0
SETTLE_S = 0.2

Steps = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Side:
    name: str
    evaluator: bool
    checkpoints: bool
    pin: bool = True


SIDES = (
    Side("alone", evaluator=False, checkpoints=False),
    Side("checkpoints", evaluator=False, checkpoints=True),
    Side("evaluator", evaluator=True, checkpoints=True),
    Side("shared", evaluator=True, checkpoints=True, pin=False),
)


def times_of(side: Side, seconds: float, meanwhile: Callable[[subprocess.Popen[bytes]], None]) -> list[Steps]:
    """When each step of one run ended, and the trainer's CPU time by then."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        plan = {"out": str(out), "seconds": seconds, "score_s": 0.9 * EVERY_S, "pin": side.pin}
        environ = {
            **os.environ,
            "SHOAL_HOME": f"{folder}/home",
            "PLAN": json.dumps(plan),
            "OMP_NUM_THREADS": "1",
            "TERM": "dumb",
        }
        options = ["--evaluator"] if side.evaluator else []
        options += ["--set", f"checkpoint.every_s={EVERY_S if side.checkpoints else 0}"]
        command = [sys.executable, "-m", "shoal.cli.main", "run", *options, str(SCRIPT)]
        with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL) as process:
            meanwhile(process)
            assert process.wait(10 * seconds + 60) == 0
        found: list[Steps] = json.loads(out.read_text())
    return found


def measure(side: Side, seconds: float) -> Steps:
    """The mean time of a step in one run, and the trainer's CPU time, in seconds, after its first few seconds."""
    times = times_of(side, seconds, lambda _process: None)
    kept = [pair for pair in times if pair[0] - times[0][0] > WARM_UP_S]
    (first, first_cpu), (last, last_cpu), count = kept[0], kept[-1], len(kept) - 1
    return (last - first) / count, (last_cpu - first_cpu) / count


def in_turns(seconds: float) -> tuple[list[float], list[float]]:
    """The median step times of turns with the evaluator stopped, and of those with it at work."""
    turns: list[tuple[float, bool]] = []

    def alternate(process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            for one in [one for one in family if _title(one).startswith("shoal local/evaluator-0")]:
                stop = not turns or not turns[-1][1]
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.suspend() if stop else one.resume()
                turns.append((time.monotonic(), stop))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TURN_S)
            if turns and time.monotonic() - turns[0][0] > seconds:
                return

    times = [at for at, _ in times_of(SIDES[2], seconds, alternate)]
    found: tuple[list[float], list[float]] = ([], [])
    for (begins, stopped), (ends, _) in itertools.pairwise(turns):
        inside = [at for at in times if begins + SETTLE_S < at < ends]
        steps = [after - before for before, after in itertools.pairwise(inside)]
        if steps and begins > times[0] + WARM_UP_S:
            found[0 if stopped else 1].append(statistics.median(steps))
    return found


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def ratio(found: list[Steps], base: list[Steps], which: int) -> float:
    return statistics.median(one[which] / alone[which] for one, alone in zip(found, base, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short repetition")
    parser.add_argument("--json", type=Path, help="where all figures go")
    given = parser.parse_args()
    repetitions, seconds = (1, 8.0) if given.quick else (7, 25.0)
    found: dict[str, list[Steps]] = {side.name: [] for side in SIDES}
    for number in range(repetitions):
        turn = number % len(SIDES)
        for side in (*SIDES[turn:], *SIDES[:turn]):
            steps = measure(side, seconds)
            found[side.name].append(steps)
            told = f"{1e3 * steps[0]:8.2f} ms, {1e3 * steps[1]:8.2f} ms of CPU"
            print(f"{number + 1}/{repetitions}  {side.name:<12}{told}", flush=True)
    print(f"\n{'side':<12}{'step, ms':>10}{'slow-down':>11}{'of CPU':>10}")
    for side in SIDES:
        mine, base = found[side.name], found["alone"]
        slower = ratio(mine, base, 0)
        verdict = (" met" if slower <= GOAL else " NOT met") if side.name == "evaluator" else ""
        step_ms = 1e3 * statistics.median(one[0] for one in mine)
        print(f"{side.name:<12}{step_ms:>10.2f}{slower - 1:>11.1%}{ratio(mine, base, 1) - 1:>10.1%}{verdict}")
    stopped, working = in_turns(20.0 if given.quick else 120.0)
    if stopped and working:
        slower = statistics.median(after / before for before, after in zip(stopped, working, strict=False))
        print(f"in turns, {len(stopped)} stopped and {len(working)} at work: {slower - 1:.1%}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
