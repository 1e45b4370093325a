"""Processes of an agent on a machine: which they are, and how to stop them so that nothing is left.

What identifies a process. A pid alone does not: the kernel hands it out again after the process has ended. The pid
together with the start time (field 22 of /proc/PID/stat, in clock ticks since boot) does, until the machine reboots;
so a record on disk adds the boot id, and the node name where a disk may be shared by several nodes. Nothing is ever
signalled by pid alone: every signal is preceded by a comparison of the start time.

What belongs to an agent. Members start processes of their own, and these may outlive their parents (then init becomes
the parent) or start a session of their own. Three properties find them all: descent from the agent, membership in the
agent's session, and the variable `ALLOCATION_MARK` in the environment that a process was started with.

How a tree is killed. A process that is killed alone may have forked a moment before, and a fork may be missed by the
walk through /proc. So all known processes get SIGSTOP first, the walk is repeated until it finds no new one, and only
then does SIGKILL follow; that is repeated until none is alive.

This module is also sent to ssh hosts as source, so it needs Linux, Python 3.7 and the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    ProcessId = tuple[int, int]
    """Pid and start time."""

ALLOCATION_MARK = "SHOAL_ALLOCATION"
POLL_S = 0.02
KILL_S = 3.0
_PR_SET_CHILD_SUBREAPER = 36


class ProcessStat(NamedTuple):
    """Fields of /proc/PID/stat; `started` is in clock ticks since boot."""

    state: str
    started: int
    parent: int
    session: int


def node_name() -> str:
    return socket.gethostname() or "?"


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def stat(pid: int) -> ProcessStat | None:
    """Return the state of a process; None if there is none with this pid."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return ProcessStat(fields[0], int(fields[19]), int(fields[1]), int(fields[3]))
    except (OSError, IndexError):
        return None


def identify(pid: int) -> ProcessId:
    """Return the identity of a process; its start time is 0 if it has ended."""
    process = stat(pid)
    return pid, process.started if process is not None else 0


def is_alive(process: ProcessId) -> bool:
    """Return whether this very process runs; a zombie does not."""
    current = stat(process[0])
    return current is not None and current.started == process[1] and current.state not in "ZX"


def living() -> dict[int, ProcessStat]:
    """Return all processes of the machine that are alive, by pid."""
    stats = ((pid, stat(pid)) for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()])
    return {pid: process for pid, process in stats if process is not None and process.state not in "ZX"}


def tree(roots: set[ProcessId]) -> set[ProcessId]:
    """Return those of `roots` that are alive, and all their living descendants."""
    children: dict[int, list[ProcessId]] = {}
    for pid, process in living().items():
        children.setdefault(process.parent, []).append((pid, process.started))
    todo, members = [root for root in roots if is_alive(root)], set()
    while todo:
        process_id = todo.pop()
        if process_id not in members:
            members.add(process_id)
            todo += children.get(process_id[0], [])
    return members


def in_session(leader: ProcessId) -> set[ProcessId]:
    """Return the living processes in the session that this process started, even if it has ended itself.

    A pid is not reused while it is still the id of a session. So if another process has it now, the session is gone.
    """
    current = stat(leader[0])
    if current is not None and current.started != leader[1]:
        return set()
    return {(pid, process.started) for pid, process in living().items() if process.session == leader[0]}


def marked(value: str) -> set[ProcessId]:
    """Return the living processes that were started with this value of `ALLOCATION_MARK`."""
    entry = f"{ALLOCATION_MARK}={value}".encode()
    return {(pid, process.started) for pid, process in living().items() if entry in _initial_environment(pid)}


def _initial_environment(pid: int) -> list[bytes]:
    """Return the environment that a process started with; empty if we may not read it."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def send(processes: set[ProcessId], number: int) -> None:
    """Send a signal to those of the processes that are alive."""
    for process in processes:
        if is_alive(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process[0], number)


def kill(processes: set[ProcessId]) -> list[int]:
    """Kill the processes and all their descendants; return the pids that are still alive after `KILL_S` seconds."""
    deadline = time.monotonic() + KILL_S
    while True:
        stopped: set[ProcessId] = set()
        while tree(processes) - stopped:
            processes = tree(processes)
            send(processes - stopped, signal.SIGSTOP)
            stopped |= processes
        if not stopped or time.monotonic() > deadline:
            return sorted(pid for pid, _ in stopped)
        send(stopped, signal.SIGKILL)
        time.sleep(POLL_S)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, where the kernel can do that."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
