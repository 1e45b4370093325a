"""Hosts that can reach each other at one of their addresses only, and not at the first."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.netns.hosts import COORDINATOR, Hosts
from tests.netns.network import Network, firewall, ip

pytestmark = [pytest.mark.netns, pytest.mark.timeout(600)]

PORTS = "29400-29409"
# Its own name leads back to it there, as many distributions have it.
NAMED = 'hostname c && echo "127.0.1.1 c" > "$1" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


class Odd(Hosts):
    """A coordinator on all interfaces; h1 has IPv4 and IPv6, h2 IPv6 alone.

    Each has an interface for containers with the address that all have, and one that leads nowhere.
    """

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        hosts = (COORDINATOR, "h1", "h2")
        for number, host in enumerate(hosts, 1):
            self.network.add(host)
            self._furnish(host, number)
        ip("-n", self.network.space("h2"), "addr", "del", f"{self.network.address('h2')}/24", "dev", "eth0")
        # Only the ports of members of h1 can be reached; replies to its own requests go to higher ports.
        firewall(self.network.space("h1"), "1-29399", "29410-32767")
        inside = ("unshare", "--uts", "--mount", "bash", "-c", NAMED, "named", str(self.records / "hosts"))
        place = (*self.network.inside(COORDINATOR), *inside)
        self.process = self._services[COORDINATOR] = self.start("coordinator", "--host", "::", where=place)
        self.until(lambda: any(self.home.glob("coordinators/*/url")), "the coordinator")
        for host in hosts[1:]:
            self.boot(host)
        return self.start("run", *self.access, *arguments, where=self.network.inside(COORDINATOR))

    def _furnish(self, host: str, number: int) -> None:
        space = self.network.space(host)
        ip("-n", space, "addr", "add", f"fd91::{number}/64", "dev", "eth0", "nodad")
        for name, address in (("docker0", "172.17.0.1/16"), ("eth1", f"10.92.0.{number}/24")):
            ip("-n", space, "link", "add", name, "type", "veth", "peer", "name", f"{name}-peer")
            ip("-n", space, "addr", "add", address, "dev", name)
            for end in (name, f"{name}-peer"):
                ip("-n", space, "link", "set", end, "up")

    @property
    def urls(self) -> str:
        return next(self.home.glob("coordinators/*/urls")).read_text().strip().replace("\n", ",")

    def boot(self, host: str) -> None:
        place = self.network.inside(host, mortal=True)
        token = ("--token-file", self.access[3])
        words = ("join", self.urls, *token, "--name", host, "--slots", "1", "--set", f"ports={PORTS}")
        self._services[host] = self.start(*words, where=place)


def test_members_find_the_only_address_that_works(network: Network, tmp_path: Path) -> None:
    run = Odd(network, tmp_path, 2, "2:2", (f"ports={PORTS}",), epochs=4)
    try:
        run.until_size(2)
        nodes = run.shoal("nodes", *run.access, where=network.inside(COORDINATOR))
        run.finish()
        run.check()
        urls = run.urls.split(",")
        port = urls[0].rpartition(":")[2]
        assert not [url for url in urls if "127.0" in url or url == f"https://c:{port}"], (
            "others were sent to themselves"
        )
        via = {one["agent"]["agent"]: one["agent"]["via"] for one in nodes}
        assert via == {"h1": f"https://{network.address(COORDINATOR)}:{port}", "h2": f"https://[fd91::1]:{port}"}
        told = {e["fields"]["member"]: e["fields"]["address"] for e in run.journal("MemberConnected")}
        assert told["h1/0"]["host"] == network.address("h1")
        assert {"fd91::2", "10.92.0.2", "172.17.0.1"} <= set(told["h1/0"]["others"])
        assert told["h2/0"]["host"] == "fd91::3"
        assert all(29400 <= one["port"] <= 29409 for one in told.values())
        assert {c["size"] for c in run.commits()} == {2}, "a member was lost on the way"
    finally:
        run.close()
