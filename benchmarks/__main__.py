"""`python -m benchmarks`: measure everything in one run, write JSON, and print the table of goals."""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import environments, machine, processes, rounds, steptime, table, unequal, unequal_table
from benchmarks.commits import TimedOutError
from benchmarks.rounds import say, shown
from benchmarks.sides.ddp import DdpWithBucketView, PlainDdp
from benchmarks.sides.shoal import Shoal, ShoalOnOneMachine
from benchmarks.sides.torchft import HastyTorchft, Torchft
from benchmarks.sides.torchrun import Torchrun

RESULTS = Path(__file__).parent / "results"
SIDES = (Shoal, Torchft, HastyTorchft, Torchrun)
STEP_SIDES = (PlainDdp, DdpWithBucketView, ShoalOnOneMachine)


def main() -> None:
    found: dict[str, Any]
    options = _options()
    if options.table:
        found = json.loads(options.table.read_text())
        print((unequal_table if "unequal" in found else table).render(found))
        return
    if options.only != ["unequal"]:
        for peer in environments.REQUIREMENTS:
            environments.ready(peer)
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found = {
        "machine": machine.describe(),
        "began": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "quick": options.quick,
        "seed": options.seed,
        "settings": {side.name: side.settings for side in SIDES},
    }
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        try:
            if "steps" in options.only:
                found["steps"] = _steps(options.quick, Path(scratch))
                _write(options.out, found)
            if "faults" in options.only:
                found["faults"] = {}
                _faults(found, options, Path(scratch))
            if "blackout" in options.only:
                found["blackout"] = _blackouts(options, Path(scratch))
            if "unequal" in options.only:
                found["unequal"] = {}
                for name, figures in unequal.measure(options.quick, Path(scratch), options.case):
                    found["unequal"][name] = figures
                    _write(options.out, found)
        finally:
            processes.end_all()
    found["took_s"] = round(time.monotonic() - began)
    _write(options.out, found)
    shown = unequal_table if "unequal" in found else table
    options.out.with_suffix(".md").write_text(shown.page(found))
    print(shown.render(found))


def _steps(quick: bool, scratch: Path) -> list[dict[str, Any]]:
    found = []
    blocks = 2 if quick else 9
    for model, batch, steps in (("cnn", 128, 20 if quick else 80), ("wide", 64, 4 if quick else 16)):
        try:
            found.append(steptime.compare(STEP_SIDES, model, batch, blocks, steps, scratch))
        except TimedOutError as failure:
            found.append({"model": model, "failed": str(failure)})
        say(f"steps of {model}: {found[-1].get('step_s')}")
    return found


def _faults(found: dict[str, Any], options: argparse.Namespace, scratch: Path) -> None:
    chance = random.Random(options.seed)
    for repetition in range(1 if options.quick else options.repetitions):
        for number, one in enumerate(rounds.planned(options.quick)):
            directory = scratch / f"round-{repetition}-{number}"
            for fault, figures in rounds.play(one, directory, chance):
                say(f"{repetition + 1}: {one.side.name}, {one.name}: {fault}: {shown(figures)}")
                where = found["faults"].setdefault(one.name, {}).setdefault(one.side.name, {})
                where.setdefault(fault, []).append(figures)
            _write(options.out, found)


def _blackouts(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    down_s = 5.0 if options.quick else options.down_s
    times = 1 if options.quick else options.repetitions
    found = {Shoal.name: rounds.blackouts(Shoal, down_s, times, scratch / "blackout-shoal")}
    if not options.quick:
        found[Torchft.name] = rounds.blackouts(Torchft, down_s, 1, scratch / "blackout-torchft")
    return found


def _write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test of all of it in about three minutes")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--down-s", type=float, default=60.0, help="how long the coordinator is gone")
    parser.add_argument("--only", type=lambda text: text.split(","), default=["steps", "faults", "blackout"])
    parser.add_argument("--case", default="", help="of `--only unequal`: only cases with this in their names")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the JSON goes  [default: benchmarks/results/latest.json]")
    parser.add_argument("--table", type=Path, metavar="JSON", help="only print the table of an earlier run")
    options = parser.parse_args()
    if "unequal" in options.only and options.only != ["unequal"]:
        parser.error("unequal machines are measured alone: --only unequal")
    named = "unequal" if options.only == ["unequal"] else "" if options.quick else "latest"
    quick = "quick" if options.quick else ""
    options.out = options.out or RESULTS / ("-".join(part for part in (named, quick) if part) + ".json")
    return options


if __name__ == "__main__":
    main()
