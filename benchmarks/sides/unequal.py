"""Members of unequal speeds: Shoal with each of its policies, and plain DDP on the same emulated machines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.sides.ddp import PlainDdp
from benchmarks.sides.side import SCRIPTS, Load, Side


class UnequalDdp(PlainDdp):
    """DDP, which has equal shares only."""

    script = "unequal_ddp.py"

    def __init__(self, directory: Path, load: Load, emulate: str, groups: str = "") -> None:
        super().__init__(directory, load)
        self._environment = {"BENCH_EMULATE": emulate, "BENCH_GROUPS": groups}

    def environment(self) -> dict[str, str]:
        return self._environment


class UnequalShoal(Side):
    """One run of one policy, with its own coordinator and agent."""

    def __init__(
        self, directory: Path, load: Load, name: str, settings: dict[str, str], emulate: str, groups: str = ""
    ) -> None:
        super().__init__(directory, load)
        self.name = name
        self._options = ["--emulate", emulate] if emulate else []
        self._options += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        self._env = {"SHOAL_HOME": str(directory / "home"), "BENCH_GROUPS": groups}
        self._shoal = str(Path(sys.executable).parent / "shoal")

    def start(self, members: int) -> None:
        script = [str(SCRIPTS / "unequal_shoal.py"), *self.load.arguments(self.directory)]
        command = [self._shoal, "run", "-n", str(members), *self._options, *script]
        self._run = processes.start(command, self.directory / "run.log", self._env)

    def story(self) -> list[dict[str, Any]]:
        """Return what `shoal why` says about the shares."""
        answer = subprocess.run(
            [self._shoal, "why", "--json"],
            env=processes.environment(self._env),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        lines = json.loads(answer.stdout) if answer.returncode == 0 else []
        return [line for line in lines if line["kind"] == "SharesDecided"]

    def alive(self) -> bool:
        return self._run.poll() is None

    def add(self) -> None:
        raise NotImplementedError("the members of this job are given")

    def remove(self, pid: int) -> None:
        raise NotImplementedError("the members of this job are given")

    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [self._run]

    def end(self) -> None:
        processes.end(self._run)
