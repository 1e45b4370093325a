"""Processes that are always ended together with their descendants."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process adopt orphaned descendants, so that it can end them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def start(argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a command in its own session; it writes to `log` and dies with this process."""
    libc = ctypes.CDLL(None)
    with log.open("ab") as file:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment(env),
            cwd=log.parent,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of processes: one thread each, and this package importable."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}


def end(process: subprocess.Popen[bytes], grace_s: float = 0.0) -> None:
    """End a process and its descendants: SIGTERM if there is a grace period, then SIGKILL."""
    try:
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        tree = []
    if grace_s and process.poll() is None:
        process.terminate()
        psutil.wait_procs(tree, timeout=grace_s)
    _kill(tree)
    process.wait(timeout=10)


def end_all() -> None:
    """End every descendant of this process, adopted ones included."""
    ends = time.monotonic() + 10
    while (tree := psutil.Process().children(recursive=True)) and time.monotonic() < ends:
        _kill(tree)
        psutil.wait_procs(tree, timeout=1)


def below(started: Sequence[subprocess.Popen[bytes]]) -> set[int]:
    """Return the pids of these processes and of all their descendants."""
    trees = [psutil.Process(process.pid) for process in started]
    return {one.pid for tree in trees for one in (tree, *tree.children(recursive=True))}


def _kill(tree: Sequence[psutil.Process]) -> None:
    for process in tree:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def send(pid: int, number: signal.Signals) -> float:
    """Send a signal and return the time."""
    at = time.monotonic()
    os.kill(pid, number)
    return at


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def memory_bytes(pid: int) -> dict[str, int]:
    """Return the memory of one process: peak resident, resident, proportional (pss) and unique (uss)."""
    fields = dict.fromkeys(("peak_rss", "rss", "pss", "uss"), 0)
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            fields["peak_rss"] = int(line.split()[1]) * 1024
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("Rss", "Pss"):
            fields[name.lower()] = int(value.split()[0]) * 1024
        elif name in ("Private_Clean", "Private_Dirty"):
            fields["uss"] += int(value.split()[0]) * 1024
    return fields
