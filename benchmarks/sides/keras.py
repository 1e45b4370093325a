"""Keras sides: Shoal, MultiWorkerMirroredStrategy, and one process that restarts from its backup."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks import processes
from benchmarks.sides.ddp import PlainDdp
from benchmarks.sides.shoal import ShoalOnOneMachine
from benchmarks.sides.side import SCRIPTS, Side


class KerasShoal(ShoalOnOneMachine):
    name = "shoal keras"
    script = "train_keras.py"


class MultiWorkerMirrored(PlainDdp):
    name = "mwms"
    script = "train_mwms.py"

    def start(self, members: int) -> None:
        workers = [f"127.0.0.1:{processes.free_port()}" for _ in range(members)]
        self._members: list[subprocess.Popen[bytes]] = []
        for rank in range(members):
            told = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
            command = [sys.executable, str(SCRIPTS / self.script), *self.load.arguments(self.directory)]
            log = self.directory / f"member{rank}.log"
            self._members.append(processes.start(command, log, {"TF_CONFIG": json.dumps(told)}))


class Backup(Side):
    """One process without a cluster to form again: the fastest possible restart."""

    name = "restart + BackupAndRestore"

    def start(self, members: int) -> None:  # noqa: ARG002
        self._start()

    def _start(self) -> None:
        command = [sys.executable, str(SCRIPTS / "train_backup.py"), *self.load.arguments(self.directory)]
        self._member = processes.start(command, self.directory / "member.log")

    def alive(self) -> bool:
        """Return True, after restarting the process if it has ended."""
        if self._member.poll() is not None:
            self._start()
        return True

    def add(self) -> None:
        raise NotImplementedError("there is only one")

    def remove(self, pid: int) -> None:
        raise NotImplementedError("there is only one")

    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [self._member]

    def end(self) -> None:
        processes.end(self._member)
