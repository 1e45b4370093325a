"""`python -m benchmarks.synchrony`: the modes of `--sync` with one member at a quarter of the others' speed.

It compares the time to the same loss on emulated machines within one run of this command: ratios, never seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "scripts" / "modes.py"
RESULT = Path(__file__).parent / "results" / "synchrony.json"
MACHINES = "sample_s=0.002,1,1,0.25"
# Their order is the table's; the first is what the others are compared with.
MODES: dict[str, tuple[str, ...]] = {
    "step, equal shares": ("--set", "shares.policy=equal"),
    "step, learned shares": (),
    "stale:4, equal tickets": ("--sync", "stale:4", "--set", "ticket_sizing=equal"),
    "stale:4, balanced by time": ("--sync", "stale:4"),
    "stale:4, balanced by staleness": ("--sync", "stale:4", "--set", "ticket_sizing=staleness"),
    "async": ("--sync", "async"),
    "local:4": ("--sync", "local:4"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--target", type=float, default=0.2)
    parser.add_argument("--only", nargs="*", default=list(MODES))
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    found: dict[str, Any] = {"machines": MACHINES, "target": options.target, "modes": {}}
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="shoal-modes-") as scratch:
            found["modes"][name] = measure(Path(scratch), MODES[name], options.epochs, options.target)
        print(name, {k: v for k, v in found["modes"][name].items() if k != "curve"}, flush=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def measure(scratch: Path, flags: tuple[str, ...], epochs: int, target: float) -> dict[str, Any]:
    """Train once and return when the loss reached the target."""
    environ = {**os.environ, "SHOAL_HOME": str(scratch / "home"), "MODES_OUT": str(scratch), "OMP_NUM_THREADS": "1"}
    environ["MODES_EPOCHS"] = str(epochs)
    command = [
        sys.executable,
        "-m",
        "shoal.cli.main",
        "-q",
        "run",
        "-n",
        "3",
        "--emulate",
        MACHINES,
        *flags,
        str(SCRIPT),
    ]
    subprocess.run(command, env=environ, check=True, timeout=900, stdout=subprocess.DEVNULL)
    rows = sorted(tuple(json.loads(line)) for file in scratch.glob("*.jsonl") for line in file.open())
    return _summary(rows, target)


def _summary(rows: list[tuple[float, int, float]], target: float) -> dict[str, Any]:
    """Return the rate, the time to the target, and the curve of the smoothed loss."""
    began, usual, reached, curve, seen = rows[0][0], rows[0][2], None, [], 0
    for at, samples, loss in rows:
        seen += samples
        part = min(1.0, samples / 2048)
        usual = (1 - part) * usual + part * loss
        if reached is None and usual <= target:
            reached = at - began
        if not curve or at - began - curve[-1][0] > 0.5:
            curve.append((round(at - began, 2), round(usual, 4)))
    rate = seen / (rows[-1][0] - began)
    return {"samples_per_s": round(rate), "to_target_s": reached, "loss": round(usual, 4), "curve": curve}


def table(found: dict[str, Any]) -> str:
    first = next(iter(found["modes"].values()))
    lines = ["| mode | samples/s, relative | time to the loss, relative | last loss |", "| --- | --- | --- | --- |"]
    for name, one in found["modes"].items():
        rate = one["samples_per_s"] / first["samples_per_s"]
        reached, base = one["to_target_s"], first["to_target_s"]
        to = f"{reached / base:.2f}" if reached and base else "not reached"
        lines.append(f"| {name} | {rate:.2f} | {to} | {one['loss']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
