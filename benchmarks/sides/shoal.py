"""Shoal with a standing coordinator and one agent per member, so that each of them can be lost separately."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, ClassVar

import psutil

from benchmarks import processes
from benchmarks.sides.side import MOST_MEMBERS, SCRIPTS, Side


class Shoal(Side):
    """A run with default settings."""

    name = "shoal"
    settings: ClassVar[dict[str, Any]] = {"all": "defaults"}
    script = "train_shoal.py"

    def start(self, members: int) -> None:
        self._shoal = str(Path(sys.executable).parent / "shoal")
        self._env = {"SHOAL_HOME": str(self.directory / "home")}
        self._home = self.directory / "coordinator"
        self._agents: list[subprocess.Popen[bytes]] = []
        self.start_coordinator()
        self._offer(members)
        script = [str(SCRIPTS / self.script), *self.load.arguments(self.directory)]
        self._run = self._command("run", ["-n", f"1:{MOST_MEMBERS}", *self._place(url_option=True), *script], "run.log")

    def start_coordinator(self) -> None:
        self._coordinator = self._command("coordinator", ["--dir", str(self._home)], "coordinator.log")
        ends = time.monotonic() + 30
        while not self._answers() and time.monotonic() < ends:
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen((self._home / "url").read_text().strip() + "/v1/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop_coordinator(self) -> None:
        processes.end(self._coordinator)

    def alive(self) -> bool:
        return self._run.poll() is None

    def add(self, slots: int = 1) -> None:
        number = len(self._agents)
        offer = ["--name", f"machine{number}", "--slots", str(slots)]
        self._agents.append(self._command("join", [*offer, *self._place()], f"agent{number}.log"))

    def _offer(self, members: int) -> None:
        for _ in range(members):
            self.add()

    def remove(self, pid: int) -> None:
        above = {process.pid for process in psutil.Process(pid).parents()}
        processes.end(next(agent for agent in self._agents if agent.pid in above))

    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [self._run, *self._agents, self._coordinator]

    def end(self) -> None:
        for process in self.processes():
            processes.end(process)

    def _place(self, url_option: bool = False) -> list[str]:
        url, token = (self._home / "url").read_text().strip(), str(self._home / "token")
        return [*(["--url"] if url_option else []), url, "--token-file", token]

    def _command(self, verb: str, arguments: list[str], log: str) -> subprocess.Popen[bytes]:
        return processes.start([self._shoal, verb, *arguments], self.directory / log, self._env)


class ShoalOnOneMachine(Shoal):
    """The usual case: one agent, from whose warm process all members are forked."""

    def _offer(self, members: int) -> None:
        self.add(slots=members)
