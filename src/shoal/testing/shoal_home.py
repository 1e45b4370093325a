"""SHOAL_HOME of its own for a test: the processes that belong to it, and their end."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil

from shoal.testing.wait import TIMEOUT_S, until


class ShoalHome:
    """A home below a working directory, and the commands that were started there."""

    def __init__(self, path: Path, **environ: str) -> None:
        self.path, self.home = path, path / "home"
        own = {"SHOAL_HOME": str(self.home), "OMP_NUM_THREADS": "1", "TERM": "dumb"}
        self.environ = {**os.environ, **own, **environ}
        self.started: list[subprocess.Popen[str]] = []

    @property
    def output(self) -> str:
        """Standard output and standard error of the last command that was started."""
        return (self.path / "out").read_text() + (self.path / "err").read_text()

    def processes(self) -> list[psutil.Process]:
        """Return every process of this home: supervisors, coordinators, agents, warm processes, members."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                named = any(str(self.home) in word for word in process.cmdline())
                inside = process.environ().get("SHOAL_HOME") == str(self.home)
                if (named or inside) and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return processes

    def has_no_processes(self) -> bool:
        return not self.processes()

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = TIMEOUT_S) -> None:
        """Block until the condition holds; fail with `what` and the output of the last command after the deadline."""
        until(condition, what, timeout_s, details=lambda: self.output, poll_s=0.1)

    def close(self) -> None:
        """Kill every process of this home."""
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for leftover in self.processes():
            with contextlib.suppress(psutil.Error):
                leftover.kill()
