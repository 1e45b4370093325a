"""Hosts for tests: each has its own network, name, processes, home and sshd; a bridge connects them to a hub.

The test itself enters the hub, so that all that it starts from then on reaches the hosts, and nothing else does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from tests.netns.network import SUBNET, Network, ip, sweep

SSHD = "/usr/sbin/sshd"
HUB = f"{SUBNET}.254"
UP_WITHIN_S = 180.0
_NEWNET = 0x40000000

SSHD_CONFIG = """
Port 22
HostKey {key}
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PidFile none
{more}
"""

SSH_CONFIG = """
Host *
  User root
  IdentityFile {path}/id
  IdentitiesOnly yes
  UserKnownHostsFile {path}/known_hosts
  GlobalKnownHostsFile /dev/null
"""

# Init of a host: sets its name and home, and reaps orphans.
INIT = """
set -e
hostname {host}
mount --bind {path}/passwd /etc/passwd
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
cd {path}
(trap - TERM; exec {sshd} -D -e -f {path}/sshd_config) &
trap 'wait' CHLD
set +e
while :; do sleep 3600 & wait; done
"""


def why_not() -> str:
    """Return what is missing for such hosts; "" if nothing."""
    if os.geteuid() != 0:
        return "hosts as namespaces need root"
    for tool, package in (("ip", "iproute2"), ("unshare", "util-linux"), (SSHD, "openssh-server")):
        if shutil.which(tool) is None:
            return f"there is no {tool}: scripts/setup-engines installs {package}"
    probe = subprocess.run(["unshare", "--net", "--uts", "--pid", "--mount", "--fork", "true"], capture_output=True)
    return f"no namespaces can be made here: {probe.stderr.decode().strip()}" if probe.returncode else ""


class SshNetwork(Network):
    """Hosts with sshd; `config` is the ssh configuration that an ssh in the hub uses."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._inits: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def config(self) -> Path:
        return self._path / "config"

    def open(self) -> None:
        super().open()
        ip("-n", self._hub, "addr", "add", f"{HUB}/24", "dev", "br0")
        self._path.mkdir(mode=0o700)
        _keygen(self._path / "id")
        self.config.write_text(SSH_CONFIG.format(path=self._path))

    def boot(self, host: str, sshd: str = "") -> None:
        """Boot a host; `sshd` has further lines for its sshd_config."""
        path = self._path / host
        if host not in self._numbers:
            self.add(host)
            self._furnish(host, path, sshd)
        enter = ["ip", "netns", "exec", self.space(host)]
        init = ["unshare", "--uts", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child", "bash", "-c"]
        with (path / "log").open("ab") as log:
            text = INIT.format(host=host, path=path, sshd=SSHD)
            self._inits[host] = subprocess.Popen(
                [*enter, *init, text], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._until_up(host)

    def _furnish(self, host: str, path: Path, sshd: str) -> None:
        home = path / "home"
        (home / ".ssh").mkdir(parents=True, mode=0o700)
        os.chmod(home, 0o700)
        shutil.copy(self._path / "id.pub", home / ".ssh" / "authorized_keys")
        _keygen(path / "host_key")
        (path / "sshd_config").write_text(SSHD_CONFIG.format(key=path / "host_key", more=sshd))
        passwd = re.sub(
            r"(?m)^(root:[^:]*:0:0:[^:]*):[^:]*:.*$", rf"\1:{home}:/bin/bash", Path("/etc/passwd").read_text()
        )
        (path / "passwd").write_text(passwd)
        with (self._path / "known_hosts").open("a") as known:
            known.write(f"{self.address(host)} {(path / 'host_key.pub').read_text()}")
        with self.config.open("a") as config:
            config.write(f"Host {host}\n  HostName {self.address(host)}\n")

    def home(self, host: str) -> Path:
        return self._path / host / "home"

    def power_off(self, host: str) -> None:
        """Power a host off: none of its connections is ever closed."""
        self.cut(host)
        self._inits[host].kill()
        self._inits[host].wait(UP_WITHIN_S)

    def processes(self, host: str) -> list[psutil.Process]:
        """Return all processes of a host, its init first."""
        return psutil.Process(self._inits[host].pid).children(recursive=True)

    def running(self, host: str, word: str) -> list[psutil.Process]:
        """Return the processes of a host with this word in their command line."""
        return self.those(host, lambda process: word in process.cmdline())

    def sshds(self, host: str) -> list[psutil.Process]:
        return self.those(host, lambda process: process.name() == "sshd")

    def those(self, host: str, fits: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
        """Return the processes of a host that match, without those that end meanwhile."""
        found = []
        for process in self.processes(host):
            with contextlib.suppress(psutil.NoSuchProcess):
                if fits(process):
                    found.append(process)
        return found

    def stop_sshd(self, host: str) -> None:
        """Stop sshd with all its connections; what it started keeps running."""
        for process in self.sshds(host):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def start_sshd(self, host: str) -> None:
        self.on(host, SSHD, "-f", str(self._path / host / "sshd_config"))
        self._until_up(host)

    def on(self, host: str, *words: str) -> str:
        """Run a command on a host without ssh."""
        init = str(self.processes(host)[0].pid)
        argv = ["nsenter", "--target", init, "--mount", "--uts", "--net", "--pid", "--", *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=UP_WITHIN_S, check=False)
        assert done.returncode == 0, f"{words} on {host}: {done.stderr}"
        return done.stdout

    def tc(self, host: str, *words: str) -> None:
        """Shape the outgoing traffic of a host's interface, or of the hub's."""
        space = self.space(host) if host else self._hub
        done = subprocess.run(["tc", "-n", space, "qdisc", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def _until_up(self, host: str) -> None:
        deadline = time.monotonic() + UP_WITHIN_S
        look = ["ip", "netns", "exec", self.space(host), "ss", "-Hltn", "sport", "=", "22"]
        while b"LISTEN" not in subprocess.run(look, capture_output=True, check=True).stdout:
            assert time.monotonic() < deadline, f"{host}: {(self._path / host / 'log').read_text()}"
            time.sleep(0.02)

    def close(self) -> None:
        for init in self._inits.values():
            init.kill()
            init.wait(UP_WITHIN_S)
        super().close()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Move this thread, and all that it starts, into the hub while the context is active."""
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self._hub}") as hub:
            _enter(hub.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())


@contextlib.contextmanager
def ssh_network(path: Path, *hosts: str) -> Iterator[SshNetwork]:
    """Boot hosts, reachable from the hub, while the context is active; leave nothing of them behind."""
    sweep()
    made = SshNetwork(path)
    try:
        made.open()
        for host in hosts:
            made.boot(host)
        with made.entered():
            yield made
    finally:
        made.close()


def _keygen(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def _enter(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "setns")
