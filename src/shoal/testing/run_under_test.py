"""A real `shoal run` under test: the records of its members, its journal, and ways to hurt it.

The script of the run appends JSON lines to files in the directory RECORDS. Each has `event`, `member`, `pid` and `at`;
`ready` is written when the script starts, and `commit`, with `step`, `world` and `size`, after every committed step. A
script that calls `shoal.testing.scripts.hold.pause_while_held` slows down until its test calls `finish`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from shoal.launch.run_lookup import process_exists
from shoal.testing.scripts import hold
from shoal.testing.wait import TIMEOUT_S, until

POLL_S = 0.05
OUTPUT_CHARS = 6000


class RunUnderTest:
    """One run of `script` in a home of its own; starts at once."""

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
        self._offsets: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []
        options = [option for setting in ("regroup_s=2", *settings) for option in ("--set", setting)]
        self.process = self.begin("-n", members, *options, str(script))

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the run itself."""
        return self.start("run", *arguments)

    def start(self, *arguments: str, where: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """Start a `shoal` command, behind the command `where`, such as one that enters a namespace."""
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*where, sys.executable, "-m", "shoal.cli.main", *arguments],
                env=self.environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def shoal(self, *arguments: str, where: tuple[str, ...] = ()) -> Any:
        """Run a `shoal` command with --json; return its decoded output, None if it printed nothing."""
        done = subprocess.run(
            [*where, sys.executable, "-m", "shoal.cli.main", "--json", *arguments],
            env=self.environ,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout) if done.stdout.strip() else None

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def name(self) -> str:
        """Id of the run."""
        run_id: str = self.shoal("ps")[0]["run"]
        return run_id

    # --- records

    def events(self) -> list[dict[str, Any]]:
        """Return all records so far in the order of time; each line is read only once."""
        for file in self.records.glob("*.jsonl"):
            with file.open() as lines:
                lines.seek(self._offsets.get(file.name, 0))
                while (line := lines.readline()).endswith("\n"):
                    self._offsets[file.name] = lines.tell()
                    self._events.append(json.loads(line))
        self._events.sort(key=lambda event: event["at"])
        return self._events

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of one kind."""
        return [event for event in self.events() if event["event"] == kind]

    def commits(self) -> list[dict[str, Any]]:
        return self.events_of("commit")

    def step(self) -> int:
        """Return the last committed step, -1 before the first."""
        return max((commit["step"] for commit in self.commits()), default=-1)

    def world_size(self) -> int:
        commits = self.commits()
        return commits[-1]["size"] if commits else 0

    def pids(self) -> dict[str, int]:
        """Return the process ids of the living members by name."""
        latest = {event["member"]: event["pid"] for event in self.events_of("ready")}
        return {name: pid for name, pid in latest.items() if process_exists(pid)}

    def journal(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return the entries of the coordinator's journal, all or those of one kind; fail if the oldest are gone."""
        return read_journal(next(self.home.glob("coordinators/*/journal.jsonl")), kind)

    def check_worlds(self) -> None:
        """Fail if a process, or the run from one step to the next, went back to a world with a lower number.

        The members' own records show it, because a journal of many events is truncated.
        """
        newest: dict[int, int] = {}
        sequences: dict[str, list[int]] = {}
        for commit in self.commits():
            sequences.setdefault(f"{commit['member']}, process {commit['pid']}", []).append(commit["world"])
            newest[commit["step"]] = max(newest.get(commit["step"], 0), commit["world"])
        sequences["the run"] = [newest[step] for step in sorted(newest)]
        for name, worlds in sequences.items():
            assert worlds == sorted(worlds), f"worlds went back for {name}: {worlds}"

    def service_process(self, word: str) -> psutil.Process:
        """Return the process of this run's "coordinator" or "agent"."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if any(f"shoal.{word}" in part for part in _command_line(child)))

    # --- waiting and hurting

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> None:
        """Block until the condition holds; fail if the run ends before, or after `timeout_s` seconds."""

        def holds() -> bool:
            if condition():
                return True
            ended = self.process.poll() is not None
            assert not ended or condition(), f"the run ended before {what}:\n{self.output[-OUTPUT_CHARS:]}"
            return ended

        until(holds, what, timeout_s, details=lambda: self.output[-OUTPUT_CHARS:], poll_s=POLL_S)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step() >= step, f"step {step}")

    def until_size(self, size: int) -> None:
        self.until(lambda: self.world_size() == size, f"a world of {size}")

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids()[name], number)

    def release(self) -> None:
        """Let the run finish as soon as it can."""
        (self.records / hold.HOLD).unlink(missing_ok=True)

    def finish(self, exit_code: int = 0, timeout_s: float = TIMEOUT_S) -> None:
        """Let the run finish and block until it has ended with this exit code."""
        self.release()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        assert self.process.poll() == exit_code, self.output[-OUTPUT_CHARS:]

    def close(self) -> None:
        """Kill the run; fail if any of its processes survives that."""
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid).children(recursive=True)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(TIMEOUT_S)
        _, alive = psutil.wait_procs(family, timeout=60)
        # A zombie, which only waits to be reaped by the process that adopted it, has no command line.
        survivors = [command for process in alive if (command := _command_line(process))]
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert not survivors, f"processes survived the end of shoal run: {survivors}"


def read_journal(file: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the entries of a journal, all or those of one kind; a last line in mid-write is left out.

    Fail if it was truncated after a snapshot: a check of what is left would pass for want of evidence.
    """
    entries = [json.loads(line) for line in file.read_text().rpartition("\n")[0].splitlines()]
    first = entries[0].get("seq", 1) if entries else 1
    assert first == 1, f"the journal begins with event {first}; look at the views or the records of the members instead"
    return [entry for entry in entries if kind is None or entry["kind"] == kind]


@contextlib.contextmanager
def closing(run: Any) -> Iterator[Any]:
    """Yield the run and close it afterwards."""
    try:
        yield run
    finally:
        run.close()


def _command_line(process: psutil.Process) -> list[str]:
    """Return the command line of a process, empty if it has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
