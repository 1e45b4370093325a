"""A real `shoal run` under test: what its members recorded, what the story says, and ways to hurt it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from shoal.core.order import Order

SCRIPT = Path(__file__).with_name("train.py")
PATIENCE_S = 90.0
# Float64 and smooth activations: what is left is the order of summation, some 1e-16 a step, which training may enlarge
# a little. A lost or repeated sample changes parameters by 1e-4 and more.
SUMMATION_ORDER = 1e-10


class Stage:
    """One run in a home of its own."""

    script = SCRIPT

    def __init__(self, path: Path, members: str = "2:3", settings: tuple[str, ...] = (), **plan: Any) -> None:
        self.home, self.records, self.plan = path / "home", path / "records", plan
        self.records.mkdir(parents=True)
        self.environ = {
            **os.environ,
            "SHOAL_HOME": str(self.home),
            "RECORDS": str(self.records),
            "FAULTS": json.dumps(plan),
            "OMP_NUM_THREADS": "1",
            "TERM": "dumb",
        }
        self._log = path / "out"
        self._read: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []
        options = [o for s in ("gather_s=2", *settings) for o in ("--set", s)]
        self.process = self.begin("-n", members, *options, str(self.script))

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the run itself."""
        return self.start("run", *arguments)

    def start(self, *arguments: str, where: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """A command of Shoal, in the place that the command `where` enters."""
        return subprocess.Popen(
            [*where, sys.executable, "-m", "shoal.cli.main", *arguments],
            env=self.environ,
            stdout=self._log.open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def shoal(self, *arguments: str, where: tuple[str, ...] = ()) -> Any:
        done = subprocess.run(
            [*where, sys.executable, "-m", "shoal.cli.main", "--json", *arguments],
            env=self.environ,
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout) if done.stdout.strip() else None

    @property
    def output(self) -> str:
        return self._log.read_text()

    # --- what happened

    def events(self) -> list[dict[str, Any]]:
        """All records so far, in the order of time; each file is read once."""
        for file in self.records.glob("*.jsonl"):
            with file.open() as lines:
                lines.seek(self._read.get(file.name, 0))
                while (line := lines.readline()).endswith("\n"):
                    self._read[file.name] = lines.tell()
                    self._events.append(json.loads(line))
        self._events.sort(key=lambda e: e["at"])
        return self._events

    def commits(self) -> list[dict[str, Any]]:
        return [e for e in self.events() if e["event"] == "commit"]

    def step(self) -> int:
        return max((e["step"] for e in self.commits()), default=-1)

    def world_size(self) -> int:
        commits = self.commits()
        return commits[-1]["size"] if commits else 0

    def pids(self) -> dict[str, int]:
        """The living members by name."""
        latest = {e["member"]: e["pid"] for e in self.events() if e["event"] == "ready"}
        return {name: pid for name, pid in latest.items() if psutil.pid_exists(pid)}

    def journal(self) -> list[dict[str, Any]]:
        file = next(self.home.glob("coordinators/*/journal.jsonl"))
        return [json.loads(line) for line in file.read_text().splitlines()]

    def helper(self, word: str) -> psutil.Process:
        """The coordinator or the agent of this run."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(p for p in children if any(f"shoal.{word}" in part for part in _command(p)))

    # --- waiting and hurting

    def until(self, ready: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience_s
        while not ready():
            assert self.process.poll() is None or ready(), f"the run ended before {what}:\n{self.output[-6000:]}"
            assert time.monotonic() < deadline, f"waited in vain for {what}:\n{self.output[-6000:]}"
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step() >= step, f"step {step}")

    def until_size(self, size: int) -> None:
        self.until(lambda: self.world_size() == size, f"a world of {size}")

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids()[name], number)

    def finish(self, exit_code: int = 0, patience_s: float = PATIENCE_S) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        assert self.process.poll() == exit_code, self.output[-6000:]

    # --- promises

    def check(self) -> None:
        """Each sample once an epoch, one trajectory, one result, and the result is that of one undisturbed member."""
        self.check_steps(self.order().total_steps)
        done = [e for e in self.events() if e["event"] == "done"]
        assert len({e["sum"] for e in done}) == 1, "members end with different states"
        finished = [e["fields"]["step"] for e in self.journal() if e["kind"] == "MemberDone"]
        assert set(finished) == {self.order().total_steps}
        self.check_parameters(torch.load(self.records / "final.pt", weights_only=True))

    def order(self) -> Order:
        plan = self.plan
        order = Order(plan.get("samples", 512), plan.get("batch", 64), plan.get("epochs", 4), 5)
        for entry in self.journal():
            if entry["kind"] == "Decided" and entry["fields"]["what"] == "batch":
                order = order.change(entry["fields"]["step"], entry["fields"]["values"]["batch"])
        return order

    def check_steps(self, total: int) -> None:
        order = self.order()
        steps: dict[int, dict[int, list[dict[str, Any]]]] = {}
        for commit in self.commits():
            steps.setdefault(commit["step"], {}).setdefault(commit["world"], []).append(commit)
        for step in range(total):
            assert step in steps, f"nobody recorded step {step}"
            for commits in steps[step].values():
                assert len({c["sum"] for c in commits}) == 1, f"members differ after step {step}"
            self._check_samples(steps[step][max(steps[step])], order, step)
        entered = [e["fields"]["world"] for e in self.journal() if e["kind"] == "EnteredWorld"]
        assert entered == sorted(entered), "worlds went back"

    def _check_samples(self, commits: list[dict[str, Any]], order: Order, step: int) -> None:
        """The last world that committed a step had each sample of it once; who died had no time to record its part."""
        batch = order.ids(step, 0, order.size_of(step)).tolist()
        seen = [i for c in commits for i in c["ids"]]
        assert len(seen) == len(set(seen)), f"a sample was counted twice in step {step}"
        assert set(seen) <= set(batch), f"step {step} has samples of another batch"
        if len(commits) == commits[0]["size"]:
            assert set(seen) == set(batch), f"step {step} lacks samples"

    def check_parameters(self, mine: dict[str, torch.Tensor], steps: int | None = None) -> None:
        reference = self.alone(steps)
        worst = max((mine[k] - reference[k]).abs().max().item() for k in mine)
        assert worst < SUMMATION_ORDER, f"the parameters differ by {worst} from those of one undisturbed member"

    def alone(self, steps: int | None) -> dict[str, torch.Tensor]:
        """The parameters after the same script, started by hand."""
        out = self.records.with_name("alone")
        if not out.exists():
            out.mkdir()
            plan = {
                k: v for k, v in self.plan.items() if k in ("samples", "batch", "epochs", "width", "compile", "shards")
            }
            environ = {**os.environ, "RECORDS": str(out), "FAULTS": json.dumps(plan | {"steps": steps})}
            command = [sys.executable, str(self.script)]
            subprocess.run(command, env=environ, check=True, capture_output=True, timeout=4 * PATIENCE_S)
        found: dict[str, torch.Tensor] = torch.load(out / "final.pt", weights_only=True)
        return found

    def close(self) -> None:
        """End everything that was started here, and insist that nothing survives."""
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid).children(recursive=True)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        _, alive = psutil.wait_procs(family, timeout=15)
        leftovers = [p.cmdline() for p in alive if p.is_running()]
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert not leftovers, f"processes survived the end of shoal run: {leftovers}"


@contextlib.contextmanager
def staged(path: Path, *args: Any, **kwargs: Any) -> Iterator[Stage]:
    stage = Stage(path, *args, **kwargs)
    try:
        yield stage
    finally:
        stage.close()


def _command(process: psutil.Process) -> list[str]:
    """Its command line, empty if it has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
