"""Commands as users give them, each in a home of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.testing.shoal_home import ShoalHome
from shoal.testing.wait import TIMEOUT_S

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


class Stage(ShoalHome):
    """A working directory with scripts, in which `shoal` commands run."""

    def __init__(self, path: Path) -> None:
        # These scripts need no torch, and importing it would take most of the tests' time.
        super().__init__(path, SHOAL_PRELOAD="json")
        for name, text in SCRIPTS.items():
            (path / name).write_text(text)

    def shoal(self, *arguments: str, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "shoal.cli.main", *arguments],
            cwd=self.path,
            env=self.environ,
            text=True,
            capture_output=True,
            timeout=timeout_s,
        )

    def start(self, *arguments: str, shell: str = 'exec "$@"') -> subprocess.Popen[str]:
        """Start a command in a session of its own, from this line of a shell; its output goes to files."""
        process = subprocess.Popen(
            ["sh", "-c", shell, "sh", sys.executable, "-m", "shoal.cli.main", *arguments],
            cwd=self.path,
            env=self.environ,
            text=True,
            stdout=(self.path / "out").open("w"),
            stderr=(self.path / "err").open("w"),
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def out(self) -> str:
        return (self.path / "out").read_text()

    def json(self, *arguments: str) -> Any:
        return json.loads(self.shoal(*arguments, "--json").stdout)

    def runs(self) -> list[dict[str, Any]]:
        views: list[dict[str, Any]] = self.json("ps")
        return views

    def directory(self) -> Path:
        """Return the directory of the only coordinator."""
        (directory,) = (self.home / "coordinators").iterdir()
        return directory

    def process(self, module: str) -> psutil.Process:
        """Return the oldest process of a module: shoal.agent or shoal.coordinator."""
        return min((p for p in self.processes() if module in p.cmdline()), key=lambda p: p.create_time())


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()
