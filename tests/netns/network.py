"""Hosts of a test: network namespaces that a bridge joins; the machine's own interfaces are left alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time

PREFIX = "shoalt"
SUBNET = "10.91.0"
GONE_WITHIN_S = 180.0


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


def firewall(space: str, *ports: str) -> None:
    """Drop what comes to these ranges of ports from other hosts, without a word; without nft, by rules of routing."""
    for family in ("-4", "-6"):
        # The rule for what is ours is moved behind those that drop.
        ip(family, "-n", space, "rule", "add", "pref", "100", "lookup", "local")
        ip(family, "-n", space, "rule", "del", "pref", "0")
        for at, span in enumerate(ports):
            words = ("iif", "eth0", "ipproto", "tcp", "dport", span, "blackhole")
            ip(family, "-n", space, "rule", "add", "pref", str(10 + at), *words)


def sweep() -> None:
    """Remove what an earlier test could not, because it was killed; one process at a time."""
    with open(os.path.join(tempfile.gettempdir(), f"{PREFIX}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in _namespaces(PREFIX):
            pid = name.split("-")[1]
            if not os.path.exists(f"/proc/{pid}"):
                _remove(name)


class Network:
    """A bridge in a hub and hosts on it, each with the address SUBNET.<number>."""

    def __init__(self) -> None:
        self._mark = f"{PREFIX}-{os.getpid()}"
        self._hub = f"{self._mark}-hub"
        self._numbers: dict[str, int] = {}

    def open(self) -> None:
        ip("netns", "add", self._hub)
        ip("-n", self._hub, "link", "set", "lo", "up")
        # Without a tree to look for, a port of the bridge forwards as soon as it is up.
        ip("-n", self._hub, "link", "add", "br0", "type", "bridge", "stp_state", "0", "forward_delay", "0")
        ip("-n", self._hub, "link", "set", "br0", "up")

    def add(self, host: str) -> None:
        number = self._numbers.setdefault(host, len(self._numbers) + 1)
        space = self.space(host)
        ip("netns", "add", space)
        ip("-n", self._hub, "link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("-n", self._hub, "link", "set", host, "master", "br0")
        ip("-n", space, "addr", "add", f"{SUBNET}.{number}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "lo", "up")
        ip("-n", space, "link", "set", "eth0", "up")
        self.heal(host)

    def address(self, host: str) -> str:
        return f"{SUBNET}.{self._numbers[host]}"

    def inside(self, host: str, *, mortal: bool = False) -> tuple[str, ...]:
        """The words that run a command on a host; killing a mortal one ends all that it ever started."""
        enter = ("ip", "netns", "exec", self.space(host))
        # The shell is the init of the host's processes: it outlives none of them and reaps all.
        init = ("bash", "-c", '"$@" & trap "kill -TERM $!" TERM; wait; wait', "init")
        return (*enter, "unshare", "--pid", "--mount-proc", "--fork", "--kill-child", *init) if mortal else enter

    def cut(self, host: str) -> None:
        """Disconnect a host at the bridge: nothing passes, and no connection is closed."""
        ip("-n", self._hub, "link", "set", host, "down")

    def heal(self, host: str) -> None:
        """Put the plug in again, and return when the bridge forwards."""
        ip("-n", self._hub, "link", "set", host, "up")
        deadline = time.monotonic() + GONE_WITHIN_S
        while "state forwarding" not in ip("-n", self._hub, "-d", "link", "show", host):
            assert time.monotonic() < deadline, f"{host} is not joined to the bridge"
            time.sleep(0.02)

    def wait_for(self, other: str, host: str) -> None:
        """Return when a host that was just healed sees another: it may have given the other's address up meanwhile."""
        connect = f"import socket; socket.create_connection(({self.address(other)!r}, 1), 1)"
        deadline = time.monotonic() + GONE_WITHIN_S
        while b"refused" not in self._try(host, connect):
            assert time.monotonic() < deadline, f"{host} does not see {other}"

    def _try(self, host: str, code: str) -> bytes:
        words = [*self.inside(host), sys.executable, "-c", code]
        return subprocess.run(words, capture_output=True, check=False).stderr

    def close(self) -> None:
        for name in _namespaces(self._mark):
            _remove(name)
        assert not _namespaces(self._mark)

    def space(self, host: str) -> str:
        return f"{self._mark}-{host}"


def _namespaces(prefix: str) -> list[str]:
    return [line.split()[0] for line in ip("netns", "list").splitlines() if line.startswith(f"{prefix}-")]


def _remove(name: str) -> None:
    """Kill all processes in a namespace, and delete the namespace."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while (pids := ip("netns", "pids", name).split()) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
    ip("netns", "del", name)
