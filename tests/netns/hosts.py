"""A run over several hosts: a standing coordinator on one, an agent that joined on each of the others."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.netns.network import Network
from tests.process.faults.checked_run import CheckedRun

COORDINATOR = "c"


class Hosts(CheckedRun):
    """One run; its members are h1/0, h2/0 and so on."""

    def __init__(self, network: Network, path: Path, count: int, *args: Any, **plan: Any) -> None:
        self.network, self.count = network, count
        self._services: dict[str, subprocess.Popen[bytes]] = {}
        super().__init__(path, *args, **plan)

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        self.network.add(COORDINATOR)
        place = self.network.inside(COORDINATOR)
        host = self.network.address(COORDINATOR)
        self.process = self._services[COORDINATOR] = self.start("coordinator", "--host", host, where=place)
        self.until(lambda: any(self.home.glob("coordinators/*/url")), "the coordinator")
        for number in range(1, self.count + 1):
            self.network.add(f"h{number}")
            self.boot(f"h{number}")
        return self.start("run", *self.access, *arguments, where=place)

    @property
    def access(self) -> tuple[str, ...]:
        directory = next(self.home.glob("coordinators/*/url")).parent
        return ("--url", (directory / "url").read_text().strip(), "--token-file", str(directory / "token"))

    def boot(self, host: str) -> None:
        """Start a host's agent, under an init that takes everything along when it is killed."""
        _, url, *token = self.access
        place = self.network.inside(host, mortal=True)
        self._services[host] = self.start("join", url, *token, "--name", host, "--slots", "1", where=place)

    def power_off(self, host: str) -> None:
        """Power a host off: none of its connections is ever closed."""
        self.network.cut(host)
        self._services[host].kill()
        self._services[host].wait(60)

    # --- what happened

    def lives(self, member: str) -> list[str]:
        """The incarnations of a member that became ready."""
        return sorted(file.name for file in self.records.glob(f"{member.replace('/', '-')}.*.jsonl"))

    def stop(self) -> None:
        """End a run whose rest is of no interest, and check all that was done."""
        place = self.network.inside(COORDINATOR)
        name = self.shoal("ps", *self.access, where=place)[0]["run"]
        self.shoal("stop", name, *self.access, where=place)
        self.finish(exit_code=75)
        self.check_steps(self.step() + 1)

    def check_steps_follow(self, *members: str) -> None:
        """Who stayed did each step once: nothing was lost, nothing done again after it was applied."""
        for member in members:
            steps = [c["step"] for c in self.commits() if c["member"] == member]
            assert steps == list(range(steps[0], steps[0] + len(steps))), f"{member} lost or repeated a step: {steps}"

    def close(self) -> None:
        for service in (self.process, *self._services.values()):
            service.kill()
            service.wait(60)


@contextlib.contextmanager
def hosted(network: Network, path: Path, count: int, *args: Any, **plan: Any) -> Iterator[Hosts]:
    hosts = Hosts(network, path, count, *args, **plan)
    try:
        yield hosts
    finally:
        hosts.close()
