"""`python -m benchmarks.profiles --data DIR`: how close the shares come to the best possible ones on measured devices.

The profiles are those of Pollux (OSDI'21): step times of one to four GPUs of a node by local batch, for five
applications. A member is such a node, made slower by some factor. Its time between two measured sizes is interpolated.
The oracle knows all times; figures are step time over the oracle's, geometric means over many random mixes.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.shares.balancer import ShareBalancer, StepMeasurement, parse

POLICIES = ("model", "ratio", "equal")
AFTER = (1, 2, 3, 12)
FACTORS = (1.0, 1.0, 1.5, 2.0)
AFFINE = ("bert", "cifar10")
PATIENCE_STEPS = 120


@dataclass(frozen=True, slots=True)
class Device:
    """Step seconds of every share from 0 to what fits in memory, and the smallest measured share."""

    seconds: NDArray[np.float64]
    least: int

    @property
    def most(self) -> int:
        return len(self.seconds) - 1


@dataclass(frozen=True, slots=True)
class Mix:
    """The members of one application and their global batch."""

    application: str
    devices: tuple[Device, ...]
    size: int


def read(directory: Path) -> dict[str, list[Device]]:
    """Return the devices of each application from its placements.csv."""
    found: dict[str, list[Device]] = {}
    for path in sorted(directory.glob("*/placements.csv")):
        points: dict[int, list[tuple[int, float]]] = {}
        with path.open(newline="") as lines:
            for row in csv.DictReader(lines):
                if len(row["placement"]) == 1:
                    gpus = int(row["placement"])
                    points.setdefault(gpus, []).append((gpus * int(row["local_bsz"]), float(row["step_time"])))
        found[path.parent.name] = [_device(sorted(points[gpus])) for gpus in sorted(points)]
    return found


def _device(points: Sequence[tuple[int, float]]) -> Device:
    """Interpolate linearly between measured sizes; extrapolate below the first, but never below zero."""
    sizes = np.array([size for size, _ in points], dtype=np.float64)
    times = np.array([seconds for _, seconds in points])
    slope = (times[1] - times[0]) / (sizes[1] - sizes[0])
    fixed_s = min(max(times[0] - slope * sizes[0], 0.0), times[0])
    every = np.arange(0, int(sizes[-1]) + 1, dtype=np.float64)
    seconds = np.interp(every, np.concatenate(([0.0], sizes)), np.concatenate(([fixed_s], times)))
    seconds[0] = 0.0
    return Device(seconds, points[0][0])


def mixes(devices: dict[str, list[Device]], count: int, seed: int) -> list[Mix]:
    """Return random unequal mixes, `count` of each application."""
    chance = random.Random(seed)
    found = []
    for application, some in devices.items():
        made = 0
        while made < count:
            members = chance.choice((2, 3, 4, 6, 8))
            chosen = []
            for _ in range(members):
                one, factor = chance.choice(some), chance.choice(FACTORS)
                chosen.append(Device(one.seconds * factor, one.least))
            least = sum(device.least for device in chosen)
            most = members * min(device.most for device in chosen)
            size = round(least * (most / least) ** chance.random())
            mix = Mix(application, tuple(chosen), size)
            equal_s = _step_s(mix, _equal(mix))
            if equal_s > 1.05 * oracle_s(mix):
                found.append(mix)
                made += 1
    return found


def oracle_s(mix: Mix) -> float:
    """Return the step time of the best possible shares."""
    # Times can fall with size: what counts is the largest share that is done in time.
    falling = [np.minimum.accumulate(device.seconds[::-1])[::-1] for device in mix.devices]
    low, high = 0.0, max(float(device.seconds.max()) for device in mix.devices)
    for _ in range(60):
        middle = (low + high) / 2
        done = sum(int(np.searchsorted(times, middle, side="right")) - 1 for times in falling)
        low, high = (low, middle) if done >= mix.size else (middle, high)
    return high


def play(mix: Mix, policy: str, noise: float, seed: int) -> list[float]:
    """Return the true step seconds at the start and after each change."""
    chance = random.Random(seed)
    names = [f"m{rank}" for rank in range(len(mix.devices))]
    limits = ", ".join(f"{name} max={device.most}" for name, device in zip(names, mix.devices, strict=True))
    balance = ShareBalancer(parse(policy, machines=limits))
    found = [_step_s(mix, balance.shares(0, mix.size, names))]
    last = step = 0
    while len(found) <= max(AFTER) and step - last < PATIENCE_STEPS:
        shares = balance.shares(step, mix.size, names)
        seen = [
            StepMeasurement(share, float(device.seconds[share]) * math.exp(chance.gauss(0.0, noise)))
            for share, device in zip(shares, mix.devices, strict=True)
        ]
        change = balance.observe(step, names, seen)
        if change is not None:
            last = step
            found.append(_step_s(mix, [change.shares[name] for name in names]))
        step += 1
    return found


def compare(devices: dict[str, list[Device]], count: int, noise: float, seed: int) -> dict[str, Any]:
    """Return step time over the oracle's by policy, application and number of changes."""
    logs: dict[tuple[str, str, int], list[float]] = {}
    changes: dict[str, list[int]] = {}
    for number, mix in enumerate(mixes(devices, count, seed)):
        best_s = oracle_s(mix)
        for policy in POLICIES:
            found = play(mix, policy, noise, seed + number)
            changes.setdefault(policy, []).append(len(found) - 1)
            for after in (0, *AFTER):
                over = math.log(found[min(after, len(found) - 1)] / best_s)
                for name in (mix.application, "all", *(("affine",) if mix.application in AFFINE else ())):
                    logs.setdefault((policy, name, after), []).append(over)
    rows = {
        f"{policy}/{name}": {str(after): round(_mean_of(logs[policy, name, after]), 4) for after in (0, *AFTER)}
        for policy, name in dict.fromkeys((policy, name) for policy, name, _ in logs)
    }
    mean_changes = {policy: round(sum(some) / len(some), 2) for policy, some in changes.items()}
    return {"noise": noise, "mixes": len(changes["model"]), "over_oracle": rows, "changes": mean_changes}


def render(found: dict[str, Any]) -> str:
    """Return the table of one comparison."""
    lines = [f"noise {found['noise']:g}, {found['mixes']} mixes", ""]
    lines += ["| shares | at first | " + " | ".join(f"after {after}" for after in AFTER) + " |", "| --- " * 6 + "|"]
    for name, by_changes in found["over_oracle"].items():
        lines.append(f"| {name} | " + " | ".join(f"{over:.3f}" for over in by_changes.values()) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiles", description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("SHOAL_PROFILES"), help="directory of the profiles")
    parser.add_argument("--mixes", type=int, default=60, help="how many of each application")
    parser.add_argument("--noise", type=float, nargs="*", default=[0.0, 0.05])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the JSON goes  [default: printed]")
    options = parser.parse_args()
    devices = read(Path(options.data)) if options.data else {}
    if not devices:
        print(f"skipped: there are no profiles in {options.data or '--data or SHOAL_PROFILES'}", file=sys.stderr)
        return
    found = [compare(devices, options.mixes, noise, options.seed) for noise in options.noise]
    print("\n\n".join(map(render, found)))
    text = json.dumps(found, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    else:
        print(text)


def _step_s(mix: Mix, shares: Sequence[int]) -> float:
    return max(float(device.seconds[share]) for device, share in zip(mix.devices, shares, strict=True))


def _equal(mix: Mix) -> list[int]:
    part, rest = divmod(mix.size, len(mix.devices))
    return [part + (rank < rest) for rank in range(len(mix.devices))]


def _mean_of(logs: Sequence[float]) -> float:
    return math.exp(math.fsum(logs) / len(logs))


if __name__ == "__main__":
    main()
