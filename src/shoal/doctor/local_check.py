"""Checks of this machine that start nothing and change nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from shoal.core.nouns import plural
from shoal.doctor.diagnosis import LITTLE_DISK_BYTES, NO_DISK_BYTES, CheckVerdict

LITTLE_SHARED_MEMORY_BYTES = 64 << 20
OLDEST_PLAUSIBLE_YEAR = 2025


def check_machine(home: Path, ports: str) -> Iterator[CheckVerdict]:
    """Yield the verdict of each check; `ports` is the range that members may listen on, empty for any."""
    checks: tuple[Callable[[], CheckVerdict], ...] = (
        _python,
        _torch,
        _loopback,
        lambda: _ports(ports),
        lambda: _writable(home),
        lambda: _disk(home),
        _clock,
        _host_name,
        _shared_memory,
    )
    for check in checks:
        yield check()


def _python() -> CheckVerdict:
    return CheckVerdict("good", "python", f"{sys.version.split()[0]}, {sys.executable}")


def _torch() -> CheckVerdict:
    import importlib.metadata

    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return CheckVerdict("warning", "torch", "not installed", "pip install 'shoal-train[torch]'")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    limited = f", OMP_NUM_THREADS={threads}" if threads else ""
    cores = len(os.sched_getaffinity(0))
    return CheckVerdict("good", "torch", f"{version}, {cores} usable {plural(cores, 'core')}{limited}")


def _loopback() -> CheckVerdict:
    import socket

    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2.0)
            with socket.create_connection(server.getsockname(), timeout=2.0) as client:
                accepted, _ = server.accept()
                with accepted:
                    client.sendall(b"shoal")
                    accepted.settimeout(2.0)
                    received = accepted.recv(5)
    except OSError as error:
        return CheckVerdict("bad", "loopback", str(error), "bring the lo interface up: ip link set lo up")
    if received != b"shoal":
        return CheckVerdict("bad", "loopback", "bytes were lost", "look for a firewall on lo")
    return CheckVerdict("good", "loopback", "sockets work")


def _ports(text: str) -> CheckVerdict:
    import socket

    from shoal.settings import port_range

    span = port_range(text)
    if span is None:
        return CheckVerdict("good", "ports", "any free port (behind a firewall, set ports=29400-29499)")
    free = 0
    for port in span:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            free += 1
    verdict: Literal["good", "bad"] = "good" if free else "bad"
    return CheckVerdict(verdict, "ports", f"{free} of {len(span)} free in {text}", "choose another range")


def _writable(home: Path) -> CheckVerdict:
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=_nearest_existing(home)):
            return CheckVerdict("good", "SHOAL_HOME", f"{home} is writable")
    except OSError as error:
        do = "set SHOAL_HOME to a directory that you can write"
        return CheckVerdict("bad", "SHOAL_HOME", f"{home}: {error.strerror}", do)


def _disk(home: Path) -> CheckVerdict:
    import shutil

    free = shutil.disk_usage(_nearest_existing(home)).free
    size = f"{free / (1 << 30):.1f} GiB" if free >= 1 << 30 else f"{free / (1 << 20):.0f} MiB"
    text = f"{size} free for {home}"
    if free >= LITTLE_DISK_BYTES:
        return CheckVerdict("good", "disk", text)
    verdict: Literal["bad", "warning"] = "bad" if free < NO_DISK_BYTES else "warning"
    return CheckVerdict(verdict, "disk", text, "free some space: logs and checkpoints go there")


def _nearest_existing(directory: Path) -> Path:
    """Return the directory or its nearest existing parent, so that a check does not have to create it."""
    return next(path for path in (directory, *directory.parents) if path.exists())


def _clock() -> CheckVerdict:
    import time

    year = time.gmtime().tm_year
    if year < OLDEST_PLAUSIBLE_YEAR:
        return CheckVerdict("bad", "clock", f"set to the year {year}", "set the clock: journals record its times")
    before = time.monotonic()
    if time.monotonic() < before:
        return CheckVerdict("bad", "clock", "the monotonic clock runs backwards", "check the machine's clock source")
    return CheckVerdict("good", "clock", time.strftime("%F %T %Z"))


def _host_name() -> CheckVerdict:
    import socket

    name = socket.gethostname()
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError:
        do = "add it to /etc/hosts if other machines are to join this one"
        return CheckVerdict("warning", "name", f"{name} does not resolve", do)
    text = f"{name} is {', '.join(addresses)}"
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        do = "members use addresses instead; fix /etc/hosts if your scripts use the name"
        return CheckVerdict("warning", "name", f"{text}: loopback only", do)
    return CheckVerdict("good", "name", text)


def _shared_memory() -> CheckVerdict:
    import shutil

    path = Path("/dev/shm")
    if not path.is_dir():
        return CheckVerdict("warning", "/dev/shm", "missing", "DataLoader workers need it; use workers=0")
    free = shutil.disk_usage(path).free
    text = f"{free / (1 << 20):.0f} MiB free"
    if free < LITTLE_SHARED_MEMORY_BYTES:
        return CheckVerdict("warning", "/dev/shm", text, "DataLoader workers need more; use workers=0")
    return CheckVerdict("good", "/dev/shm", text)
