"""torchft with a lighthouse and one replica group per member, each restarted the moment it exits."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from typing import Any, ClassVar

from benchmarks import environments, processes
from benchmarks.sides.side import MOST_MEMBERS, SCRIPTS, Side


class Torchft(Side):
    """torchft with short heartbeats, ticks and timeouts, and the join timeout of its README."""

    name = "torchft"
    settings: ClassVar[dict[str, Any]] = {
        "quorum_tick_ms": 10,
        "join_timeout_ms": 10_000,
        "heartbeat_timeout_ms": 500,
        "heartbeat_interval_ms": 50,
        "collective_timeout_s": {"cnn": 0.5, "wide": 5.0},
        "quorum_retries": 10,
        "restart_delay_s": 0,
    }

    def start(self, members: int) -> None:
        self._bin = environments.ready("torchft")
        self._port = processes.free_port()
        self._ended = False
        self._gone: set[int] = set()
        self._replicas: dict[int, subprocess.Popen[bytes]] = {}
        self._watchers: list[threading.Thread] = []
        self.start_coordinator()
        time.sleep(0.5)
        for number in range(members):
            self._watch(number)

    def start_coordinator(self) -> None:
        flags = ("quorum_tick_ms", "join_timeout_ms", "heartbeat_timeout_ms")
        command = [str(self._bin / "torchft_lighthouse"), "--min_replicas=1", f"--bind=127.0.0.1:{self._port}"]
        command += [f"--{flag}={self.settings[flag]}" for flag in flags]
        self.lighthouse = processes.start(command, self.directory / "lighthouse.log", {"RUST_LOG": "error"})

    def stop_coordinator(self) -> None:
        processes.end(self.lighthouse)

    def _watch(self, number: int) -> None:
        started = threading.Event()
        watcher = threading.Thread(target=self._keep_running, args=(number, started), daemon=True)
        watcher.start()
        started.wait(10)
        self._watchers.append(watcher)

    def _keep_running(self, number: int, started: threading.Event) -> None:
        while not self._ended and number not in self._gone:
            command = [
                str(self._bin / "python"),
                str(SCRIPTS / "train_torchft.py"),
                *self.load.arguments(self.directory),
            ]
            env = {
                "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._port}",
                "REPLICA_GROUP_ID": str(number),
                "NUM_REPLICA_GROUPS": str(MOST_MEMBERS),
                "TORCHFT_QUORUM_RETRIES": str(self.settings["quorum_retries"]),
                "RUST_LOG": "error",
                "GLOO_SOCKET_IFNAME": "lo",
                "BENCH_TORCHFT_TIMEOUT_S": str(self.settings["collective_timeout_s"][self.load.model]),
            }
            replica = processes.start(command, self.directory / f"replica{number}.log", env)
            self._replicas[number] = replica
            started.set()
            replica.wait()

    def alive(self) -> bool:
        return not self._ended

    def add(self) -> None:
        number = min(set(range(MOST_MEMBERS)) & self._gone, default=len(self._replicas))
        self._gone.discard(number)
        self._watch(number)

    def remove(self, pid: int) -> None:
        number = next(number for number, replica in self._replicas.items() if replica.pid == pid)
        self._gone.add(number)
        os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        self._ended = True
        for replica in list(self._replicas.values()):
            processes.end(replica)
        processes.end(self.lighthouse)
        for watcher in self._watchers:
            watcher.join(10)


class HastyTorchft(Torchft):
    """torchft that does not wait for members that still seem alive: faster, but late replicas form separate worlds."""

    name = "torchft-hasty"
    settings: ClassVar[dict[str, Any]] = {**Torchft.settings, "join_timeout_ms": 200, "heartbeat_timeout_ms": 300}
