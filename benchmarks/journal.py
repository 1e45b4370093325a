"""Cost of a long life: the start of a coordinator after a million events, and the journal of an ordinary run.

python -m benchmarks.journal [--quick] [--out FILE]        about six minutes; results/journal.{json,md}

*Start*: a coordinator handles the last 20,000 of a million events of one long run of two members, truncating its
journal as it goes; it is then started as a process of its own, and its CPU time and peak memory are read when it
serves. (Of the events before these only the snapshot would be left in any case, so they are only counted.) The same
20,000 events without truncation show what a disk that refused every snapshot would cost.

*Growth*: `shoal run -n 2` trains with default settings for a few minutes; the journal's growth after the first minute
is scaled to an hour. Neither figure depends on how busy the machine is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.thousand import Coordinator
from shoal.coordinator.compaction import Compactor
from shoal.coordinator.service import CoordinatorService
from shoal.core.membership import events as ev
from shoal.core.runs.events import RunCreated
from shoal.core.runs.spec import RunSpec
from shoal.core.world import Address
from shoal.store import journal
from shoal.store.journal import Journal
from shoal.store.sqlite_views import SqliteViews

RESULTS = Path(__file__).parent / "results"
GOALS = {"start_cpu_s": 3.0, "start_peak_mb": 150.0, "journal_mb_per_h": 0.3}
MEMBERS = ("lab/0", "lab/1")
# Events between two looks at whether the journal is long; a coordinator looks every second.
LOOK_EVERY = 500
LIFE = 1_000_000
SCRIPT = """
import time, torch, shoal.torch as shoal
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.ones(4096, 8), torch.ones(4096, 1))
run = shoal.join()
run.attach(model, optimizer)
for x, y in run.batches(data, size=64, epochs=100000, seed=0):
    time.sleep(0.02)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    run.backward(loss)
    optimizer.step()
    run.log(loss=loss)
"""


def life() -> Iterator[ev.Event]:
    """Yield the events of a run that trains for days: steps, checkpoints, shares, members that leave and come back."""
    number = 0
    while True:
        number += 1
        step = 10 * number
        yield ev.ProgressRecorded(step)
        yield ev.CheckpointWritten(MEMBERS[0], step, f"checkpoints/step-{step}")
        yield ev.AdjustmentReported(MEMBERS[0], step, "shares", {"lab/0": 40, "lab/1": 24}, "lab/1 is slower")
        if number % 10 == 0:
            yield ev.MemberLost(MEMBERS[1], "lease expired after 3.1 s of silence")
            yield from connect(MEMBERS[1], str(number))


def connect(member: str, incarnation: str) -> Iterator[ev.Event]:
    yield ev.MemberConnected(member, incarnation, Address("127.0.0.1", 1000))
    yield ev.MemberReady(member, "model", None)


async def live(directory: Path, events: int, *, truncate: bool) -> None:
    """Let a coordinator handle so many events, the last of a million if it truncates its journal."""
    if truncate:
        Journal(directory).close()
        journal.write_snapshot(directory, journal.JournalSnapshot(LIFE - events, 0.0, b""))
    service = CoordinatorService(directory, Journal(directory), SqliteViews(directory), directory.name)
    compactor = Compactor(service._journal, service.views, service.encode_state)
    service.handle("long", RunCreated(RunSpec("long", ("train.py",), "/", (1, 2)), {"tensorboard": False}))
    for member in MEMBERS:
        for event in connect(member, "1"):
            service.handle("long", event)
    for number, event in zip(range(events), life(), strict=False):
        service.handle("long", event)
        if number % LOOK_EVERY == 0:
            await service.views.flush()
            if truncate and compactor.is_due():
                await compactor.compact()
    service.close()


def start(events: int, *, truncate: bool) -> dict[str, Any]:
    """Return what it costs to start a coordinator after so many events."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "coordinator"
        (directory / "runs").mkdir(parents=True)
        began = time.process_time()
        asyncio.run(live(directory, events, truncate=truncate))
        handled_s = time.process_time() - began
        sizes = {name: (directory / name).stat().st_size for name in (journal.FILE, "views.sqlite")}
        coordinator = Coordinator(directory, "127.0.0.1")
        cpu_s, peak = coordinator.cpu_s(), coordinator.peak_bytes()
        coordinator.end()
    return {
        "events": LIFE if truncate else events,
        "start_cpu_s": round(cpu_s, 2),
        "start_peak_mb": round(peak / 1e6, 1),
        "journal_mb": round(sizes[journal.FILE] / 1e6, 2),
        "views_mb": round(sizes["views.sqlite"] / 1e6, 1),
        "handled_us_per_event": round(1e6 * handled_s / events, 1),
    }


def growth(seconds: float) -> dict[str, Any]:
    """Return how fast the journal of a run of two members grows, after its first minute."""
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "train.py"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "shoal.cli.main", "run", "-n", "2", str(script)]
        env = {**os.environ, "SHOAL_HOME": str(Path(scratch) / "home")}
        run = subprocess.Popen(command, cwd=scratch, env=env, stdout=subprocess.DEVNULL)
        try:
            time.sleep(60.0)
            file = next(Path(scratch).glob("home/coordinators/*/journal.jsonl"))
            before = file.stat().st_size
            time.sleep(seconds)
            grown, kinds = file.stat().st_size - before, _kinds(file, before)
            if run.poll() is not None or not kinds:
                raise RuntimeError("the run did not train")
        finally:
            run.terminate()
            run.wait(60.0)
    return {"seconds": seconds, "journal_mb_per_h": round(grown * 3600.0 / seconds / 1e6, 4), "kinds": kinds}


def _kinds(file: Path, offset: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    for line in file.read_bytes()[offset:].splitlines():
        kind = json.loads(line)["kind"]
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def page(figures: dict[str, Any]) -> str:
    """Return the figures as a page."""
    start, untruncated, growth = figures["start"], figures["untruncated"], figures["growth"]
    rows = [
        (f"start after {start['events']:,} events, CPU", f"{start['start_cpu_s']:.2f} s", "≤ 3 s"),
        ("its peak memory", f"{start['start_peak_mb']:.0f} MB", "≤ 150 MB"),
        ("the journal by then", f"{start['journal_mb']:.2f} MB", ""),
        ("its growth with two members", f"{growth['journal_mb_per_h']:.3f} MB/h", "≤ 0.3 MB/h"),
        (
            f"start after {untruncated['events']:,} events that were not truncated",
            f"{untruncated['start_cpu_s']:.2f} s",
            "",
        ),
        ("one event: journaled, applied, shown", f"{start['handled_us_per_event']:.0f} µs", ""),
    ]
    lines = ["# The journal", "", "| | measured | goal |", "| --- | --- | --- |"]
    lines += [f"| {name} | {value} | {goal} |" for name, value, goal in rows]
    on = figures["machine"]
    lines += ["", f"Measured by `python -m benchmarks.journal` on {on['cpu']}, Python {on['python']}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print the page, and write it with the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test: fewer events, a shorter run")
    parser.add_argument("--out", type=Path, default=RESULTS / "journal.json")
    options = parser.parse_args()
    events, seconds = (6_000, 20.0) if options.quick else (20_000, 240.0)
    figures = {
        "machine": machine.describe(),
        "goals": GOALS,
        "start": start(events, truncate=True),
        "untruncated": start(events, truncate=False),
        "growth": growth(seconds),
    }
    options.out.write_text(json.dumps(figures, indent=1) + "\n")
    text = page(figures)
    options.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
