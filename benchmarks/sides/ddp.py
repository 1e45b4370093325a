"""Plain DDP, whose processes are started directly, as a launcher would."""

from __future__ import annotations

import subprocess
import sys

from benchmarks import processes
from benchmarks.sides.side import SCRIPTS, Side


class PlainDdp(Side):
    name = "ddp"
    script = "train_ddp.py"
    bucket_view = False

    def start(self, members: int) -> None:
        port = processes.free_port()
        self._members: list[subprocess.Popen[bytes]] = []
        for rank in range(members):
            env = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(members),
                "GLOO_SOCKET_IFNAME": "lo",
                "BENCH_BUCKET_VIEW": str(int(self.bucket_view)),
                **self.environment(),
            }
            command = [sys.executable, str(SCRIPTS / self.script), *self.load.arguments(self.directory)]
            self._members.append(processes.start(command, self.directory / f"member{rank}.log", env))

    def environment(self) -> dict[str, str]:
        """Return the environment of the script."""
        return {}

    def alive(self) -> bool:
        return all(member.poll() is None for member in self._members)

    def add(self) -> None:
        raise NotImplementedError("plain DDP cannot grow")

    def remove(self, pid: int) -> None:
        raise NotImplementedError("plain DDP cannot shrink")

    def processes(self) -> list[subprocess.Popen[bytes]]:
        return self._members

    def end(self) -> None:
        for member in self._members:
            processes.end(member)


class DdpWithBucketView(PlainDdp):
    """DDP with `gradient_as_bucket_view`: less memory and one copy less."""

    name = "ddp+view"
    bucket_view = True
