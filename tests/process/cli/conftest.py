"""Commands as users give them, each in a home of its own, with nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

PATIENCE_S = 60.0

SCRIPTS = {
    "hello.py": "import os\nprint('hello from', os.environ['SHOAL_MEMBER'], flush=True)\n",
    "wait.py": "import time\nprint('waiting', flush=True)\ntime.sleep(300)\n",
    "stubborn.py": (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('waiting', flush=True)\ntime.sleep(300)\n"
    ),
    "raise.py": "def broken():\n    raise ValueError('no such thing')\nbroken()\n",
    "until.py": (
        "import os, sys, time\n"
        "print('pid', os.getpid(), flush=True)\n"
        "while not os.path.exists(sys.argv[1]):\n    time.sleep(0.05)\n"
    ),
}


class Stage:
    """A home, a working directory with scripts, and the commands that were started there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.home = path / "home"
        for name, text in SCRIPTS.items():
            (path / name).write_text(text)
        # These scripts need no torch, and importing it would take most of the tests' time.
        ours = {"SHOAL_HOME": str(self.home), "SHOAL_PRELOAD": "json", "OMP_NUM_THREADS": "1", "TERM": "dumb"}
        self.environ = {**os.environ, **ours}
        self._started: list[subprocess.Popen[str]] = []

    def shoal(self, *arguments: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "shoal.cli.main", *arguments],
            **self._where(),
            capture_output=True,
            timeout=timeout_s,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal.cli.main", *arguments],
            **self._where(),
            stdout=(self.path / "out").open("w"),
            stderr=(self.path / "err").open("w"),
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def _where(self) -> dict[str, Any]:
        return {"cwd": self.path, "env": self.environ, "text": True}

    def out(self) -> str:
        return (self.path / "out").read_text()

    def json(self, *arguments: str) -> Any:
        return json.loads(self.shoal(*arguments, "--json").stdout)

    def runs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.json("ps")
        return found

    def directory(self) -> Path:
        (found,) = (self.home / "coordinators").iterdir()
        return found

    def processes(self) -> list[psutil.Process]:
        """Every process that names this home: supervisors, coordinators, agents, warm processes, members."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                named = any(str(self.home) in word for word in process.cmdline())
                inside = process.environ().get("SHOAL_HOME") == str(self.home)
                if (named or inside) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def process(self, module: str) -> psutil.Process:
        """The first process of a module: shoal.agent or shoal.coordinator."""
        return min((p for p in self.processes() if module in p.cmdline()), key=lambda p: p.create_time())

    def wait(self, what: str, reached: Callable[[], object]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < until, (
                f"waited in vain until {what}\n{self.out()}\n{(self.path / 'err').read_text()}"
            )
            time.sleep(0.1)

    def all_gone(self) -> bool:
        return not self.processes()

    def close(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for left in self.processes():
            with contextlib.suppress(psutil.Error):
                left.kill()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()
