"""Information about this machine: usable cores and memory, devices, and the addresses to announce to peers.

In a container or a batch job, the machine has more than this process may use. So cores and memory are the minimum of
what the machine has, what the affinity mask allows, and the limits of the control group and all its parents, for cgroup
versions 1 and 2. Functions take the root of the file system as an argument, so that tests can supply one.
"""

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
    """Return the description of this machine for the coordinator."""
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
    """Return how many cores this process may use, by affinity and control-group quota; at least one."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, math.floor(_cpu_quota(root))))


def _cpu_quota(root: Path) -> float:
    limits = [math.inf]
    for directory in _cgroup_directories(root, "cpu"):
        match _numbers(directory / "cpu.max"):
            case [quota, period] if period > 0:
                limits.append(quota / period)
        quota_us, period_us = _numbers(directory / "cpu.cfs_quota_us"), _numbers(directory / "cpu.cfs_period_us")
        if quota_us and period_us and quota_us[0] > 0 and period_us[0] > 0:
            limits.append(quota_us[0] / period_us[0])
    least = min(limits)
    return 1e9 if least == math.inf else least


def core_speed(lasting_s: float = 0.15, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how fast one core multiplies small matrices, in arbitrary units: the best of several attempts.

    It only serves to compare machines, as the first estimate of speeds, which training corrects from its first steps.
    """
    import numpy as np

    # Small enough that no library uses several threads.
    matrix = np.full((64, 64), 0.5, dtype=np.float32)
    best, ends = 0.0, clock() + lasting_s
    while clock() < ends:
        began = clock()
        for _ in range(PROBE_ROUNDS):
            matrix @ matrix
        best = max(best, PROBE_ROUNDS / max(clock() - began, 1e-9))
    return best


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the usable memory: the machine's, or less if a control group limits it."""
    limits = [psutil.virtual_memory().total]
    for directory in _cgroup_directories(root, "memory"):
        for file in ("memory.max", "memory.limit_in_bytes"):
            if (numbers := _numbers(directory / file)) and 0 < numbers[0] < _NO_LIMIT_BYTES:
                limits.append(int(numbers[0]))
    return min(limits)


def memory_free_bytes() -> int:
    return int(psutil.virtual_memory().available)


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed for lack of memory; only differences are meaningful."""
    count = 0
    files = [root / "proc/vmstat"]
    for directory in _cgroup_directories(root, "memory"):
        files += [directory / "memory.events", directory / "memory.oom_control"]
    for file in files:
        for line in _text(file).splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.strip().isdigit():
                count += int(value)
    return count


def _cgroup_directories(root: Path, controller: str) -> list[Path]:
    """Return the directories of our control group and all its parents, for cgroup versions 1 and 2."""
    directories: list[Path] = []
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
            directories += [top / part for part in (inner, *inner.parents)]
    return list(dict.fromkeys(directories))


def devices(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the names of NVIDIA devices, from the driver's files or from nvidia-smi; needs no framework."""
    models = []
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        model = [line.partition(":")[2].strip() for line in _text(file).splitlines() if line.startswith("Model:")]
        models += model[:1]
    return tuple(models) or _nvidia_smi_devices()


def _nvidia_smi_devices() -> tuple[str, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())


def addresses() -> tuple[str, ...]:
    """Return the addresses of all interfaces that are up, the most useful to other machines first."""
    active = interfaces.active_interfaces()
    others = tuple(address for interface in active for address in interface.addresses)
    return tuple(dict.fromkeys((*candidates(active, interfaces.default_addresses()), *others)))


def address_of(interface: str) -> str:
    """Return the address of a named interface, IPv4 before IPv6; raise `PeerUnreachable` if there is none."""
    existing = psutil.net_if_addrs()
    entries = existing.get(interface, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in entries:
            if entry.family == family and "%" not in entry.address:
                return entry.address
    raise PeerUnreachable(
        f"unknown network interface {interface!r}, or it has no address",
        why=f"this machine has {', '.join(sorted(existing))}",
        do="set interface to one of them, or leave it empty",
    )


def hosts_to_announce(url: str, interface: str = "") -> tuple[str, ...]:
    """Return the addresses at which peers can reach members of this machine, likeliest first.

    A coordinator without TLS serves only its own machine, so the loopback address is enough.
    """
    if interface:
        return (address_of(interface),)
    parts = urlsplit(url)
    secure = parts.scheme in ("https", "wss")
    host, port = parts.hostname or "", parts.port or (443 if secure else 80)
    towards = _local_address_towards(host, port)
    if _is_loopback(towards) and not secure:
        return (towards,)
    return candidates(interfaces.active_interfaces(), (towards,)) or (towards,)


def _local_address_towards(host: str, port: int) -> str:
    """Return the address that the kernel would send from; raise `PeerUnreachable` if there is no route."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise PeerUnreachable(f"cannot resolve host {host!r}", why=str(error), do="check its URL") from error
    address = interfaces.source_address(host, port)
    if not address:
        raise PeerUnreachable(f"no route to the coordinator at {host}", do="check its URL, or set interface")
    return address


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
    """Return the numbers in a small file; empty if it holds anything else, such as "max"."""
    try:
        return [float(word) for word in _text(path).split()]
    except ValueError:
        return []
