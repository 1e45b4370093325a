"""Cost of an evaluator to the trainers, on its own core: step time with and without it.

python -m benchmarks.evaluator [--quick] [--out FILE]      about 22 minutes, 6 with --quick, on a quiet machine

One trainer has the first core; the evaluator, the coordinator and the agent have the last one. Checkpoints are written
every few seconds, more often than usual, and are also measured alone. The evaluator scores for most of the time; the
result says for how much of it. The sides take turns, and each turn begins with another side, so that other load on the
machine affects all of them. A side's figure is the median over its runs of the mean step; its slow-down is
the ratio of medians, with the lowest and the highest ratio of a single turn as its spread. The trainer's CPU time says
what remains on a machine that is not quiet. `shared` leaves it to the system which core each process gets.

The cores of a machine share caches, memory and, if they are virtual, sometimes a physical core. So in `stranger` a
process that has nothing to do with the run does the same scoring on the last core: its cost is the machine's, and only
what the evaluator costs beyond it is Shoal's.

The speed of a machine varies more from run to run than an evaluator could slow a trainer down. So the figure comes from
within one run: the evaluator is stopped and continued every second, and each second at work is compared with the two
around it. The result is the median over all turns with its 95 % confidence interval; the stranger is stopped and
continued likewise. The sides above show the cost of checkpoints, as far as that variation allows.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import machine

RESULT = Path(__file__).parent / "results" / "evaluator.json"
SCRIPT = Path(__file__).with_name("scripts") / "evaluated.py"
CORES = sorted(os.sched_getaffinity(0))
EVERY_S = 5.0
# What is measured begins so long after the first step, and not before the first evaluation.
WARM_UP_S = EVERY_S + 1.0
GOAL = 1.03
TURN_S = 1.0
SETTLE_S = 0.2


@dataclass(frozen=True, slots=True)
class Side:
    name: str
    evaluator: bool
    checkpoints: bool
    pin: bool = True
    stranger: bool = False


ALONE = Side("alone", evaluator=False, checkpoints=False)
CHECKPOINTS = Side("checkpoints", evaluator=False, checkpoints=True)
STRANGER = Side("stranger", evaluator=False, checkpoints=True, stranger=True)
EVALUATOR = Side("evaluator", evaluator=True, checkpoints=True)
SHARED = Side("shared", evaluator=True, checkpoints=True, pin=False)


def idle(_process: subprocess.Popen[bytes], _folder: Path) -> None:
    """Do nothing while a run continues."""


@dataclass(frozen=True, slots=True)
class Told:
    """Record of one run: end of each step, the trainer's CPU time by then, and the intervals of scoring."""

    begins_at: float
    steps: list[tuple[float, float]]
    scored: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Figures:
    """Mean step time and CPU time of one run, in seconds, and the fraction of time that the evaluator scored."""

    step_s: float
    cpu_s: float
    scoring: float


def played(side: Side, seconds: float, meanwhile: Callable[[subprocess.Popen[bytes], Path], None] = idle) -> Told:
    """Run a side once."""
    with tempfile.TemporaryDirectory() as folder:
        cores = {"trainer": CORES[0], "evaluator": CORES[-1]} if side.pin else {}
        plan = {"out": folder, "seconds": seconds, "score_s": 0.9 * EVERY_S, "cores": cores}
        plan |= {"scored": side.evaluator or side.stranger, "every_s": EVERY_S, "warm_up_s": WARM_UP_S}
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
        with (
            subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL) as process,
            beside(environ) if side.stranger else contextlib.nullcontext(),
        ):
            if side.pin:
                # What it starts is there too, until the script moves the trainer away.
                os.sched_setaffinity(process.pid, {CORES[-1]})
            meanwhile(process, Path(folder))
            if process.wait(10 * seconds + 180) != 0:
                raise RuntimeError(f"a run of {side.name} ended with {process.returncode}")
        scores = Path(folder) / "scores.jsonl"
        scored = [json.loads(line) for line in scores.read_text().splitlines()] if scores.exists() else []
        trained = json.loads((Path(folder) / "steps.json").read_text())
        return Told(trained["begins_at"], trained["steps"], scored)


@contextlib.contextmanager
def beside(environ: dict[str, str]) -> Iterator[None]:
    """Run the stranger beside a run."""
    with subprocess.Popen([sys.executable, str(SCRIPT), "stranger"], env=environ) as process:
        try:
            yield
        finally:
            process.kill()


def figures_of(told: Told) -> Figures:
    """Return the figures of a run without its first few seconds."""
    kept = [pair for pair in told.steps if pair[0] >= told.begins_at]
    (first, first_cpu), (last, last_cpu), count = kept[0], kept[-1], len(kept) - 1
    scoring_s = sum(max(0.0, min(end, last) - max(begin, first)) for begin, end in told.scored)
    return Figures((last - first) / count, (last_cpu - first_cpu) / count, scoring_s / (last - first))


def in_turns(side: Side, seconds: float) -> list[float]:
    """Return, for each turn, how much longer steps take while the evaluator or the stranger works, as a ratio."""
    turns: list[tuple[float, bool]] = []

    def alternate(process: subprocess.Popen[bytes], folder: Path) -> None:
        other: psutil.Process | None = None
        try:
            while process.poll() is None and (not turns or time.monotonic() - turns[0][0] < seconds):
                if (folder / "scoring").exists():
                    other = other or (stranger_here() if side.stranger else evaluator_of(process))
                with contextlib.suppress(psutil.NoSuchProcess):
                    if other is not None:
                        stop = not turns or not turns[-1][1]
                        other.suspend() if stop else other.resume()
                        turns.append((time.monotonic(), stop))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(TURN_S)
        finally:
            # A run waits for its evaluator.
            with contextlib.suppress(psutil.NoSuchProcess):
                if other is not None:
                    other.resume()

    told = played(side, seconds, alternate)
    return ratios_of(turns, [at for at, _ in told.steps if at >= told.begins_at])


def stranger_here() -> psutil.Process | None:
    for one in psutil.Process().children():
        if one.cmdline()[-1:] == ["stranger"]:
            return one
    return None


def evaluator_of(process: subprocess.Popen[bytes]) -> psutil.Process | None:
    for one in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if " ".join(one.cmdline()).startswith("shoal local/evaluator-0"):
                return one
    return None


def ratios_of(turns: Sequence[tuple[float, bool]], times: Sequence[float]) -> list[float]:
    """Return the ratio of the mean step of each working turn to that of the two stopped turns around it."""
    means: list[tuple[bool, float | None]] = []
    for (begins, stopped), (ends, _) in itertools.pairwise(turns):
        inside = [at for at in times if begins + SETTLE_S < at < ends]
        usable = len(inside) > 1 and begins >= times[0]
        means.append((stopped, (inside[-1] - inside[0]) / (len(inside) - 1) if usable else None))
    found: list[float] = []
    for (_, before), (stopped, mean), (_, after) in zip(means, means[1:], means[2:], strict=False):
        if not stopped and before and mean and after:
            found.append(mean / math.sqrt(before * after))
    return found


def median_of(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its distribution-free 95 % confidence interval."""
    ordered, half = sorted(ratios), 0.98 * math.sqrt(len(ratios))
    low, high = max(0, math.floor(len(ordered) / 2 - half)), min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half))
    return statistics.median(ordered), ordered[low], ordered[high]


def slowdown(mine: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of medians and the lowest and highest ratio of a turn."""
    ratios = [one / other for one, other in zip(mine, base, strict=True)]
    return statistics.median(mine) / statistics.median(base), min(ratios), max(ratios)


def shown(ratio: float, low: float, high: float) -> str:
    return f"{ratio - 1:+.1%} ({low - 1:+.1%} … {high - 1:+.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs, and not `shared`: 6 minutes")
    parser.add_argument("--out", type=Path, default=RESULT, help="where all figures go, and the table beside them")
    given = parser.parse_args()
    if len(CORES) < 2:
        parser.error("this needs two cores: one for the trainer and one for its evaluator")
    about = machine.describe()
    sides = (ALONE, CHECKPOINTS, STRANGER, EVALUATOR, *(() if given.quick else (SHARED,)))
    repetitions, seconds, turns_s = (2, 12.0, 120.0) if given.quick else (7, 20.0, 300.0)
    found: dict[str, list[Figures]] = {side.name: [] for side in sides}
    for number in range(repetitions):
        first = number % len(sides)
        for side in (*sides[first:], *sides[:first]):
            figures = figures_of(played(side, seconds))
            found[side.name].append(figures)
            told = f"{1e3 * figures.step_s:8.2f} ms, {1e3 * figures.cpu_s:8.2f} ms of CPU"
            print(f"{number + 1}/{repetitions}  {side.name:<12}{told}, scoring {figures.scoring:.0%}", flush=True)
    turns = {side.name: in_turns(side, turns_s) for side in (EVALUATOR, STRANGER)}
    text = render(about, found, turns)
    print(text)
    given.out.write_text(json.dumps(as_json(about, found, turns), indent=1) + "\n")
    given.out.with_suffix(".md").write_text(text)


def render(about: dict[str, Any], found: dict[str, list[Figures]], turns: dict[str, list[float]]) -> str:
    """Return the results as tables."""
    met = median_of(turns[EVALUATOR.name])[0] <= GOAL
    lines = [
        "# What an evaluator costs the trainers",
        "",
        f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB; load before: {about['load_before']}.",
        "",
        "Steps while it works against steps while it is stopped, in turns of one run: the median, and where it lies",
        "with 95 % probability. A *stranger* does the same work on the same core and knows nothing of the run.",
        "",
        "| who works | turns | steps are slower by | goal | met |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, ratios in turns.items():
        goal = f"≤ {GOAL - 1:.0%} | {'yes' if met else '**no**'}" if name == EVALUATOR.name else "|"
        lines.append(f"| {name} | {len(ratios)} | {shown(*median_of(ratios))} | {goal} |")
    lines += [
        "",
        "Runs of each kind, medians (lowest … highest of a turn); they differ by the machine's mood too.",
        "",
        "| side | step, ms | slower than alone | in CPU time | evaluator at work |",
        "| --- | --- | --- | --- | --- |",
    ]
    base = found[ALONE.name]
    for name, mine in found.items():
        slower = slowdown([one.step_s for one in mine], [one.step_s for one in base])
        cpu = slowdown([one.cpu_s for one in mine], [one.cpu_s for one in base])
        step_ms = 1e3 * statistics.median(one.step_s for one in mine)
        scoring = statistics.median(one.scoring for one in mine)
        lines.append(f"| {name} | {step_ms:.2f} | {shown(*slower)} | {shown(*cpu)} | {scoring:.0%} |")
    return "\n".join([*lines, ""])


def as_json(about: dict[str, Any], found: dict[str, list[Figures]], turns: dict[str, list[float]]) -> dict[str, Any]:
    sides = {name: [[one.step_s, one.cpu_s, one.scoring] for one in mine] for name, mine in found.items()}
    return {"machine": about, "sides": sides, "in_turns": turns}


if __name__ == "__main__":
    main()
