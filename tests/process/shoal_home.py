"""A SHOAL_HOME of its own for a test: the processes that belong to it, and their end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

TIMEOUT_S = 90.0


class ShoalHome:
    """A home below a working directory, and the commands that were started there."""

    def __init__(self, path: Path, **environ: str) -> None:
        self.path, self.home = path, path / "home"
        own = {"SHOAL_HOME": str(self.home), "OMP_NUM_THREADS": "1", "TERM": "dumb"}
        self.environ = {**os.environ, **own, **environ}
        self.started: list[subprocess.Popen[str]] = []

    @property
    def output(self) -> str:
        """What the last command that was started has printed, to both streams."""
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

    def wait(self, what: str, condition: Callable[[], object]) -> None:
        """Block until the condition holds; `what` says for what in the error."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"timed out: {what}\n{self.output}"
            time.sleep(0.1)

    def close(self) -> None:
        """Kill all that is left."""
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for leftover in self.processes():
            with contextlib.suppress(psutil.Error):
                leftover.kill()
