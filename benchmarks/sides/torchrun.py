"""torchrun elastic with one agent per member, so that a whole machine can be lost."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any, ClassVar

import psutil

from benchmarks import environments, processes
from benchmarks.sides.side import MOST_MEMBERS, SCRIPTS, Side


class Torchrun(Side):
    """torchrun with timeouts as short as its documentation allows: a last call of seconds, keep-alives every second."""

    name = "torchrun"
    settings: ClassVar[dict[str, Any]] = {
        "rdzv": {
            "join_timeout": 120,
            "last_call_timeout": 3,
            "close_timeout": 5,
            "heartbeat": 2,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 3,
        },
        "monitor_interval_s": 0.1,
        "shutdown_timeout_s": 3,
        "collective_timeout_s": 10,
        "checkpoint_every_steps": 10,
    }

    def start(self, members: int) -> None:
        self._bin = environments.ready("torchrun")
        self._port = processes.free_port()
        self._agents: list[subprocess.Popen[bytes]] = []
        for _ in range(members):
            self.add()

    def add(self) -> None:
        number = len(self._agents)
        settings: dict[str, Any] = {**self.settings["rdzv"], "is_host": int(number == 0)}
        command = [
            str(self._bin / "torchrun"),
            f"--nnodes=1:{MOST_MEMBERS}",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self._port}",
            "--rdzv-id=bench",
            "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in settings.items()),
            "--local-addr=127.0.0.1",
            "--max-restarts=100",
            f"--monitor-interval={self.settings['monitor_interval_s']}",
            f"--shutdown-timeout={self.settings['shutdown_timeout_s']}",
            str(SCRIPTS / "train_torchrun.py"),
            *self.load.arguments(self.directory),
        ]
        # Workers that share the agents' store read stale addresses after a restart: pytorch/pytorch#135712.
        env = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._agents.append(processes.start(command, self.directory / f"agent{number}.log", env))

    def alive(self) -> bool:
        """Return whether the first agent runs: it holds the rendezvous, without which the job cannot continue."""
        return self._agents[0].poll() is None

    def remove(self, pid: int) -> None:
        agent = psutil.Process(pid).ppid()
        os.kill(agent, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)

    def can_lose(self, pid: int) -> bool:
        return psutil.Process(pid).ppid() != self._agents[0].pid

    def end(self) -> None:
        for agent in self._agents:
            processes.end(agent)
