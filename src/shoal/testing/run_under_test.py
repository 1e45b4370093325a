"""A real `shoal run` under test: what its members recorded, what the journal says, and ways to hurt it.

The script of the run writes what happens to it into JSON lines in the directory RECORDS: `event`, `member`, `pid` and
`at` on each, `ready` when it begins, and `commit` with `step`, `world` and `size` after every committed step. If it
calls `shoal.testing.scripts.hold.tarry`, it takes its time until its test calls `finish`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from shoal.testing.scripts import hold

PATIENCE_S = 90.0
LOOK_S = 0.05


class RunUnderTest:
    """One run in a home of its own."""

    def __init__(
        self,
        path: Path,
        script: Path,
        members: str = "2:3",
        settings: tuple[str, ...] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.home, self.records = path / "home", path / "records"
        self.records.mkdir(parents=True)
        (self.records / hold.HOLD).touch()
        self.environ = {
            **os.environ,
            "SHOAL_HOME": str(self.home),
            "RECORDS": str(self.records),
            "OMP_NUM_THREADS": "1",
            "TERM": "dumb",
            **(environ or {}),
        }
        self._log = path / "out"
        self._read: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []
        options = [o for s in ("regroup_s=2", *settings) for o in ("--set", s)]
        self.process = self.begin("-n", members, *options, str(script))

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the run itself."""
        return self.start("run", *arguments)

    def start(self, *arguments: str, where: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """A command of Shoal, in the place that the command `where` enters."""
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*where, sys.executable, "-m", "shoal.cli.main", *arguments],
                env=self.environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def shoal(self, *arguments: str, where: tuple[str, ...] = ()) -> Any:
        """What a command of Shoal answers."""
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

    @property
    def name(self) -> str:
        """The run's id."""
        found: str = self.shoal("ps")[0]["run"]
        return found

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

    def of(self, event: str) -> list[dict[str, Any]]:
        """The records of one kind."""
        return [e for e in self.events() if e["event"] == event]

    def commits(self) -> list[dict[str, Any]]:
        return self.of("commit")

    def step(self) -> int:
        """The last step that was committed; -1 before the first."""
        return max((e["step"] for e in self.commits()), default=-1)

    def world_size(self) -> int:
        commits = self.commits()
        return commits[-1]["size"] if commits else 0

    def pids(self) -> dict[str, int]:
        """The living members by name."""
        latest = {e["member"]: e["pid"] for e in self.of("ready")}
        return {name: pid for name, pid in latest.items() if psutil.pid_exists(pid)}

    def journal(self, kind: str | None = None) -> list[dict[str, Any]]:
        """What the coordinator wrote down, all of it or the entries of one kind."""
        file = next(self.home.glob("coordinators/*/journal.jsonl"))
        # The last line may be being written.
        entries = [json.loads(line) for line in file.read_text().rpartition("\n")[0].splitlines()]
        return [entry for entry in entries if kind is None or entry["kind"] == kind]

    def helper(self, word: str) -> psutil.Process:
        """The coordinator or the agent of this run."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(p for p in children if any(f"shoal.{word}" in part for part in _command(p)))

    # --- waiting and hurting

    def until(self, ready: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> None:
        """Wait until it is so; fail if the run ends or takes too long before."""
        deadline = time.monotonic() + patience_s
        while not ready():
            assert self.process.poll() is None or ready(), f"the run ended before {what}:\n{self.output[-6000:]}"
            assert time.monotonic() < deadline, f"waited in vain for {what}:\n{self.output[-6000:]}"
            time.sleep(LOOK_S)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step() >= step, f"step {step}")

    def until_size(self, size: int) -> None:
        self.until(lambda: self.world_size() == size, f"a world of {size}")

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids()[name], number)

    def release(self) -> None:
        """Let the run come to its end as soon as it can."""
        (self.records / hold.HOLD).unlink(missing_ok=True)

    def finish(self, exit_code: int = 0, patience_s: float = PATIENCE_S) -> None:
        """Wait for the end of the run."""
        self.release()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        assert self.process.poll() == exit_code, self.output[-6000:]

    def close(self) -> None:
        """End everything that was started here, and insist that nothing survives."""
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid).children(recursive=True)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE_S)
        _, alive = psutil.wait_procs(family, timeout=60)
        # What has ended, and only waits for whoever adopted it, has no command line any more.
        leftovers = [command for p in alive if (command := _command(p))]
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert not leftovers, f"processes survived the end of shoal run: {leftovers}"


@contextlib.contextmanager
def closing(stage: Any) -> Iterator[Any]:
    """The stage, closed afterwards."""
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
