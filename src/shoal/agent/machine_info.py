"""What machine this is: cores and memory that we may use, devices, addresses; and which address to announce."""

from __future__ import annotations

import ipaddress
import math
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from shoal.core.addresses import candidates
from shoal.core.runs.spec import MachineInfo
from shoal.errors import PeerUnreachable
from shoal.wire import interfaces

_NO_LIMIT_BYTES = 1 << 60
PROBE_ROUNDS = 500


def machine(name: str, root: Path = Path("/")) -> MachineInfo:
    """All that the coordinator wants to know of this machine."""
    return MachineInfo(
        name=name,
        cores=cores(root),
        memory_bytes=memory_bytes(root),
        devices=devices(root),
        addresses=addresses(),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
    )


def cores(root: Path = Path("/")) -> int:
    """Cores that we may run on and have the quota for, at least one."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, math.floor(_cpu_quota(root))))


def _cpu_quota(root: Path) -> float:
    limits = [math.inf]
    for place in _cgroup_places(root, "cpu"):
        match _numbers(place / "cpu.max"):
            case [quota, period] if period > 0:
                limits.append(quota / period)
        quota_us, period_us = _numbers(place / "cpu.cfs_quota_us"), _numbers(place / "cpu.cfs_period_us")
        if quota_us and period_us and quota_us[0] > 0 and period_us[0] > 0:
            limits.append(quota_us[0] / period_us[0])
    least = min(limits)
    return 1e9 if least == math.inf else least


def core_speed(lasting_s: float = 0.15, clock: Callable[[], float] = time.perf_counter) -> float:
    """How fast one core of this machine multiplies small matrices, in arbitrary units: the best of several tries.

    Only comparisons between machines mean anything; training corrects them from its first steps on.
    """
    import numpy as np

    # So small that no library spreads it over threads.
    matrix = np.full((64, 64), 0.5, dtype=np.float32)
    best, ends = 0.0, clock() + lasting_s
    while clock() < ends:
        began = clock()
        for _ in range(PROBE_ROUNDS):
            matrix @ matrix
        best = max(best, PROBE_ROUNDS / max(clock() - began, 1e-9))
    return best


def memory_bytes(root: Path = Path("/")) -> int:
    """Memory that we may use: the machine's, or less if the control group says so."""
    limits = [psutil.virtual_memory().total]
    for place in _cgroup_places(root, "memory"):
        for file in ("memory.max", "memory.limit_in_bytes"):
            if (numbers := _numbers(place / file)) and 0 < numbers[0] < _NO_LIMIT_BYTES:
                limits.append(int(numbers[0]))
    return min(limits)


def memory_free_bytes() -> int:
    return int(psutil.virtual_memory().available)


def oom_kills(root: Path = Path("/")) -> int:
    """How often the kernel has killed for want of memory; only differences mean anything."""
    count = 0
    files = [root / "proc/vmstat"]
    for place in _cgroup_places(root, "memory"):
        files += [place / "memory.events", place / "memory.oom_control"]
    for file in files:
        for line in _text(file).splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.strip().isdigit():
                count += int(value)
    return count


def _cgroup_places(root: Path, controller: str) -> list[Path]:
    """The directories of our control group, of version 1 and 2, and of all its parents."""
    places: list[Path] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            tops = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            tops = [root / "sys/fs/cgroup" / controllers, root / "sys/fs/cgroup" / controller]
        else:
            continue
        inner = Path(path.lstrip("/"))
        for top in dict.fromkeys(tops):
            places += [top / part for part in (inner, *inner.parents)]
    return list(dict.fromkeys(places))


def devices(root: Path = Path("/")) -> tuple[str, ...]:
    """Names of the NVIDIA devices, without a framework: from the driver's files, else from nvidia-smi."""
    found = []
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        model = [line.partition(":")[2].strip() for line in _text(file).splitlines() if line.startswith("Model:")]
        found += model[:1]
    return tuple(found) or _asked_nvidia_smi()


def _asked_nvidia_smi() -> tuple[str, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip())


def addresses() -> tuple[str, ...]:
    """Addresses of all interfaces that are up, other machines' first choice first."""
    known = interfaces.interfaces()
    others = tuple(address for one in known for address in one.addresses)
    return tuple(dict.fromkeys((*candidates(known, interfaces.outward()), *others)))


def address_of(interface: str) -> str:
    """The address of a named interface, IPv4 before IPv6."""
    known = psutil.net_if_addrs()
    entries = known.get(interface, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in entries:
            if entry.family == family and "%" not in entry.address:
                return entry.address
    raise PeerUnreachable(
        f"there is no interface {interface!r} with an address on this machine",
        why=f"there are {', '.join(sorted(known))}",
        do="set interface to one of these, or leave it empty",
    )


def hosts_to_announce(url: str, interface: str = "") -> tuple[str, ...]:
    """The addresses under which members here may be reached by those who use the same coordinator, likeliest first.

    A coordinator that speaks no TLS serves this machine alone.
    """
    if interface:
        return (address_of(interface),)
    parts = urlsplit(url)
    secure = parts.scheme in ("https", "wss")
    host, port = parts.hostname or "", parts.port or (443 if secure else 80)
    towards = _local_address_towards(host, port)
    if _is_loopback(towards) and not secure:
        return (towards,)
    return candidates(interfaces.interfaces(), (towards,)) or (towards,)


def _local_address_towards(host: str, port: int) -> str:
    """The address that the kernel would send from."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise PeerUnreachable(f"the host {host!r} has no address", why=str(error), do="check its URL") from error
    found = interfaces.towards(host, port)
    if not found:
        raise PeerUnreachable(f"there is no route to the coordinator at {host}", do="check its URL, or set interface")
    return found


def _is_loopback(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _numbers(path: Path) -> list[float]:
    """The numbers in a small file; empty if it says "max" or anything else."""
    try:
        return [float(word) for word in _text(path).split()]
    except ValueError:
        return []
