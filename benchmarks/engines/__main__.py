"""`python -m benchmarks.engines`: time to the first step on a cluster, cost of a lost machine, and leftovers.

Shoal and the usual launcher of that cluster take turns, so that other load on the machine affects both. New figures
replace the same figures in the JSON file; the rest of the file stays.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine, processes
from benchmarks.commits import TimedOutError
from benchmarks.engines import figures, leftovers, page
from benchmarks.engines.sides import PEERS, Shoal, Side
from benchmarks.engines.sites import SITES, Site
from benchmarks.rounds import say, shown

RESULTS = Path(__file__).parents[1] / "results"
PARTS = ("start", "loss", "leftovers")
# On each of two engines; four of five are crashes of coordinators, agents and clients.
FAULTS = 60
LOSSES = 3
Measure = Callable[[Side[Any], Path], figures.Figures]


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    parts = [part for part in PARTS if part in options.only]
    for part in parts:
        now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        found[part] = {**found.get(part, {}), "machine": machine.describe(), "began": now}
    found["settings"] = {peer.name: dict(peer.settings) for peers in PEERS.values() for peer in peers}
    if "leftovers" in parts:
        faults = 10 if options.quick else FAULTS
        found["leftovers"]["rounds"] = []
        for engine in leftovers.ENGINES:
            found["leftovers"]["rounds"].append(leftovers.count(engine, faults))
            _write(options.out, found)
    # Not before: what the others kill would stay here as zombies.
    processes.adopt_orphans()
    try:
        if "start" in parts or "loss" in parts:
            for kind in SITES:
                if kind.name in options.on:
                    try:
                        _measure(kind, parts, found, options)
                    except (AssertionError, TimeoutError) as failure:
                        # The cluster itself gave up; what was found on it until then is kept.
                        say(f"{kind.name}: given up: {str(failure)[:2000]}")
    finally:
        processes.end_all()
    options.out.with_suffix(".md").write_text(page.page(found))
    print(page.page(found))


def _measure(kind: type[Site], parts: list[str], found: dict[str, Any], options: argparse.Namespace) -> None:
    """Start one cluster and measure all of its figures."""
    if why := kind.why_not():
        say(f"{kind.name}: SKIPPED, {why}")
        return
    chance, times = random.Random(options.seed), 2 if options.quick else options.repetitions
    with (
        # Sockets below it must have short names.
        tempfile.TemporaryDirectory(prefix="shoal-bench-", dir="/tmp", ignore_cleanup_errors=True) as scratch,
        kind(Path(scratch, "site")).open() as site,
    ):
        sides: list[Side[Any]] = [Shoal(site, Path(scratch, "shoal"))]
        sides += [peer(site, Path(scratch, f"peer-{number}")) for number, peer in enumerate(PEERS[kind.name])]
        if "start" in parts:
            # The first round fills caches, and is not counted.
            rounds = _in_turns(sides, times + 1, figures.first_step, Path(scratch))
            kept = {name: one[1:] for name, one in rounds.items()}
            found["start"].setdefault("sites", {})[kind.name] = kept
            _write(options.out, found)
        if "loss" in parts and site.survives:
            lasting = [side for side in sides if side.survives]
            losses = 1 if options.quick else min(times, LOSSES)
            rounds = _in_turns(lasting, losses, lambda side, where: figures.loss(side, where, chance), Path(scratch))
            found["loss"].setdefault("sites", {})[kind.name] = rounds
            _write(options.out, found)


def _in_turns(sides: list[Side[Any]], times: int, measure: Measure, scratch: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    for number in range(times):
        first = number % len(sides)
        for side in (*sides[first:], *sides[:first]):
            one: dict[str, Any]
            try:
                one = dict(measure(side, scratch / f"job-{time.monotonic_ns()}"))
            except TimedOutError as failure:
                one = {"failed": str(failure)}
            found[side.name].append(one)
            say(f"{number + 1}/{times}  {side.site.name}  {side.name}: {shown(one)}")
    return found


def _write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two starts, one loss, twenty faults: under five minutes")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", type=lambda text: text.split(","), default=["start", "loss"], help=", ".join(PARTS))
    parser.add_argument("--on", type=lambda text: text.split(","), default=[site.name for site in SITES])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the JSON goes, and the table beside it")
    options = parser.parse_args()
    options.out = options.out or RESULTS / ("engines-quick.json" if options.quick else "engines.json")
    return options


if __name__ == "__main__":
    main()
