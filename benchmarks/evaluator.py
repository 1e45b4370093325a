"""What an evaluator on its own core costs the trainers: step time with and without it, as ratios of one repetition.

python -m benchmarks.evaluator [--quick] [--json FILE]

One trainer has the first core, the evaluator the last one; it scores for most of the time. Checkpoints are written
every few seconds, more often than is usual, and are measured by themselves too. Sides take turns, so that whatever else
the machine does hits all of them; the trainer's CPU time says what remains on a machine that is not quiet. `shared`
leaves it to the system which core each of them gets.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("scripts") / "evaluated.py"
EVERY_S = 5.0
WARM_UP_S = 3.0
GOAL = 1.03


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


Steps = tuple[float, float]


def measure(side: Side, seconds: float) -> Steps:
    """The mean time of a step in one run, and the trainer's CPU time, in seconds, after its first few seconds."""
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
        subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL, timeout=10 * seconds + 60)
        times = json.loads(out.read_text())
    kept = [pair for pair in times if pair[0] - times[0][0] > WARM_UP_S]
    (first, first_cpu), (last, last_cpu), count = kept[0], kept[-1], len(kept) - 1
    return (last - first) / count, (last_cpu - first_cpu) / count


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
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
