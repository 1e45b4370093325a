"""Demo: a small network learns digits while its members are killed, added and given notice.

scripts/demo, or: python examples/demo.py

It trains first in one undisturbed process, then with `shoal run` under faults. It ends with a table of the cost of each
event and the distance between the two results. The exit code is 0 only if everything went well.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
SCRIPT = HERE / "digits" / "train.py"
WATCHED = HERE / "watched.py"
ARGUMENTS = ["--dtype", "float64", "--width", "12"]
SHOAL = [sys.executable, "-m", "shoal.cli.main"]
BOUND = 1e-8  # float64 and smooth activations: what is left is the order of sums, grown over the steps
PATIENCE_S = 120.0
PACE_S = 0.06
SETTLE_STEPS = 15
DONE = "it is done"
DUST_S = 0.005  # a step that was applied within this time after the event was complete before it
SHOWN = {
    "ProcessStarted",
    "FormWorld",
    "ProposeWorld",
    "MembershipNote",
    "CheckpointRestored",
    "CoordinatorRestarted",
    "MemberHung",
    "MemberLeaving",
    "MemberLeft",
    "MemberLost",
    "RunScaled",
    "WorldEntered",
    "AnnounceFinished",
    "ClaimCompleted",
    "MarkRunFailed",
    "MarkRunEnded",
}

console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)


@dataclass
class Event:
    """A fault of the run: its time and the affected processes."""

    text: str
    at: float
    survivors: set[int]
    hit: set[int]
    change: str


@dataclass
class Cost:
    """Cost of one event, from the times at which the surviving members applied their steps."""

    event: str
    members: str
    next_step_s: float
    stall_s: float
    repeated: int


class Demo:
    """One elastic run under faults."""

    def __init__(self, folder: Path, epochs: int) -> None:
        self.folder = folder
        self.trace = folder / "trace"
        self.trace.mkdir()
        (self.trace / "pace").write_text(str(PACE_S))
        self.out = folder / "elastic.pt"
        self.epochs = epochs
        self.home = folder / "home"
        self.environ = {**os.environ, "SHOAL_HOME": str(self.home), "OMP_NUM_THREADS": "1"}
        self.told = 0
        self.began = time.time()
        self.events: list[Event] = []

    # --- the run, seen from outside

    def start(self) -> subprocess.Popen[bytes]:
        arguments = [*ARGUMENTS, "--epochs", str(self.epochs), "--out", str(self.out)]
        command = [*SHOAL, "run", "-n", "2:3", "--name", "demo", str(WATCHED), str(self.trace), str(SCRIPT), *arguments]
        with (self.folder / "shoal.log").open("wb") as log:
            return subprocess.Popen(command, env=self.environ, stdout=log, stderr=log)

    def shoal(self, *arguments: str) -> str:
        return subprocess.run(
            [*SHOAL, *arguments], env=self.environ, check=True, timeout=60, capture_output=True, text=True
        ).stdout

    def ask(self, path: str) -> object:
        """Send one GET to the coordinator; return None while it is down."""
        for home in self.home.glob("coordinators/*"):
            try:
                token = (home / "token").read_text().splitlines()[0]
                request = urllib.request.Request(
                    (home / "url").read_text().strip() + path, headers={"Authorization": f"Bearer {token}"}
                )
                with urllib.request.urlopen(request, timeout=2) as answer:
                    return json.load(answer)
            except (OSError, urllib.error.URLError):
                return None
        return None

    def view(self) -> dict:
        view = self.ask("/v1/runs/demo")
        return view if isinstance(view, dict) else {}

    def training(self) -> list[dict]:
        return [member for member in self.view().get("members", []) if member["status"] == "training"]

    def tell(self) -> None:
        """Print the new entries of the run's story."""
        lines = self.ask(f"/v1/runs/demo/story?after={self.told}&limit=200")
        for line in lines if isinstance(lines, list) else []:
            self.told = line["seq"]
            if line["kind"] in SHOWN and "waiting" not in line["text"]:
                console.print(f"[dim]{line['at'] - self.began:8.1f} s  {line['text']}[/dim]")

    def wait(self, what: str, reached: Callable[[], bool]) -> None:
        until = time.time() + PATIENCE_S
        while not reached():
            if what != DONE and self.process.poll() is not None:
                raise RuntimeError(f"the run ended while waiting until {what}")
            if time.time() > until:
                raise RuntimeError(f"waited {PATIENCE_S:.0f} s in vain until {what}")
            self.tell()
            time.sleep(0.1)

    def settle(self, members: int) -> None:
        """Wait until so many members train and have committed some steps together since the last event."""
        since = self.events[-1].at if self.events else 0.0
        gone = {pid for event in self.events for pid in event.hit}

        def settled() -> bool:
            pids = {member["pid"] for member in self.training()} - gone
            made = [sum(when > since for when, _ in self.steps(pid)) for pid in pids]
            return len(pids) == members and min(made) >= SETTLE_STEPS

        self.wait(f"{members} members train", settled)
        self.tell()

    def steps(self, pid: int) -> list[tuple[float, int]]:
        """Return (time, step) of every step that a process has applied."""
        file = self.trace / f"{pid}.txt"
        rows = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(float(row[0]), int(row[1])) for row in rows if len(row) == 2]

    # --- what happens to it

    @contextmanager
    def event(self, text: str, hit: set[int], change: str) -> Iterator[None]:
        before = {member["pid"] for member in self.training()}
        at = time.time()
        console.print(f"[bold yellow]{at - self.began:8.1f} s  {text}[/bold yellow]")
        yield
        self.events.append(Event(text, at, before - hit, hit, change))

    def kill(self, count: int) -> None:
        chosen = self.training()[-count:]
        names = " and ".join(member["member"] for member in chosen)
        size = len(self.training())
        with self.event(f"kill -9 {names}", {member["pid"] for member in chosen}, f"{size} → {size - count}"):
            for member in chosen:
                os.kill(member["pid"], signal.SIGKILL)

    def add(self, most: int) -> None:
        size = len(self.training())
        with self.event(f"shoal scale demo 2:{most}", set(), f"{size} → {most}"):
            self.shoal("scale", "demo", f"2:{most}")

    def warn(self) -> None:
        member, size = self.training()[0], len(self.training())
        with self.event(f"SIGTERM to {member['member']}", {member["pid"]}, f"{size} → {size - 1}"):
            os.kill(member["pid"], signal.SIGTERM)

    def kill_the_coordinator(self) -> None:
        pid = int(next(self.home.glob("coordinators/*/pid")).read_text())
        size = len(self.training())
        with self.event("kill -9 the coordinator", set(), f"{size}"):
            os.kill(pid, signal.SIGKILL)

    def run(self) -> list[Cost]:
        self.process = self.start()
        try:
            self.settle(3)
            self.kill(1)
            self.settle(3)
            self.add(4)
            self.settle(4)
            self.warn()
            self.settle(4)
            self.kill_the_coordinator()
            self.settle(4)
            self.kill(2)
            self.settle(4)
            (self.trace / "pace").unlink()
            self.wait(DONE, lambda: self.process.poll() is not None)
            if self.process.wait(600) != 0:
                raise RuntimeError(f"shoal run ended with exit code {self.process.returncode}")
        except BaseException:
            console.print((self.folder / "shoal.log").read_text()[-4000:], markup=False)
            raise
        finally:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                try:
                    self.process.wait(30)
                except subprocess.TimeoutExpired:
                    self.process.kill()
        return [self.cost(index) for index in range(len(self.events))]

    def cost(self, index: int) -> Cost:
        """Return the longest pause of a survivor, from 2 s before the event to the next one, against its usual step."""
        event = self.events[index]
        until = self.events[index + 1].at if index + 1 < len(self.events) else event.at + 5.0
        next_s, stall_s, repeated = 0.0, 0.0, 0
        for pid in event.survivors:
            rows = [(when, step) for when, step in self.steps(pid) if event.at - 2.0 < when < until]
            gaps = [(after[0] - before[0], after[0]) for before, after in itertools.pairwise(rows)]
            usual_s = statistics.median(gap for gap, _ in gaps)
            worst_s = max(gap for gap, ended in gaps if ended > event.at)
            next_s = max(next_s, min(ended for _, ended in gaps if ended > event.at + DUST_S) - event.at)
            stall_s = max(stall_s, worst_s - usual_s)
            repeated = max(repeated, len(rows) - len({step for _, step in rows}))
        return Cost(event.text, event.change, next_s, stall_s, repeated)


def alone(folder: Path, epochs: int) -> tuple[Path, str]:
    """Run the same file without Shoal's launcher; return (parameters, last line)."""
    out = folder / "alone.pt"
    command = [sys.executable, str(SCRIPT), *ARGUMENTS, "--epochs", str(epochs), "--out", str(out)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, timeout=600, stdout=subprocess.PIPE, text=True, cwd=folder, env=environ)
    return out, done.stdout.strip().splitlines()[-1]


def distance(one: Path, other: Path) -> float:
    """Return the largest difference of any parameter, relative to the largest parameter."""
    left, right = (torch.load(path, weights_only=True) for path in (one, other))
    assert left.keys() == right.keys()
    scale = max(value.abs().max().item() for value in left.values())
    return max((left[name] - right[name]).abs().max().item() for name in left) / scale


def show(costs: list[Cost]) -> None:
    table = Table(title="What it cost", title_style="bold", title_justify="left")
    table.add_column("event")
    for name in ("members", "next step after", "others stalled", "steps lost"):
        table.add_column(name, justify="right")
    for cost in costs:
        table.add_row(
            cost.event,
            cost.members,
            f"{cost.next_step_s * 1000:.0f} ms",
            f"{max(0.0, cost.stall_s) * 1000:.0f} ms",
            str(cost.repeated),
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=80)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-demo-") as name:
        folder = Path(name)
        console.print(f"[bold]1. {args.epochs} epochs alone and undisturbed[/bold]")
        undisturbed, line = alone(folder, args.epochs)
        console.print(f"  {line}")
        console.print("[bold]2. The same with shoal run -n 2:3, slowed down to watch, while members are killed[/bold]")
        demo = Demo(folder, args.epochs)
        try:
            costs = demo.run()
        except RuntimeError as error:
            console.print(f"[bold red]failed:[/bold red] {error}")
            return 1
        said = [line for line in demo.shoal("logs", "demo").splitlines() if "accuracy" in line]
        console.print(f"  {said[-1] if said else 'it printed no accuracy'}")
        show(costs)
        apart = distance(undisturbed, demo.out)
    good = apart <= BOUND and bool(said) and all(cost.repeated == 0 for cost in costs)
    console.print(
        f"largest difference to the undisturbed run: {apart:.1e} (bound {BOUND:.0e}: the order of sums in float64)"
    )
    console.print("[bold green]all well[/bold green]" if good else "[bold red]not as promised[/bold red]")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
