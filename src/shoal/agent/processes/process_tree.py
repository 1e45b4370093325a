"""Process trees of members: which processes descend from one, and how to end a tree so that nothing is left.

A pid alone is never trusted: a process is known by its pid and its start time together, and psutil compares both before
it sends a signal. Only descendants of the calling process are ever signalled, with one exception: what a dead agent of
the same directory left behind (`orphan_cleanup`).

A member is ended in two steps. SIGTERM goes to the member alone, so that it can hand over while its helpers still work.
After the grace period, SIGKILL goes to the whole tree, again and again until none of it is alive. The tree is recorded
while the member lives, because its children have another parent once it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Collection, Iterable

import psutil

from shoal.errors import ForeignProcess

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GONE = (psutil.NoSuchProcess, psutil.ZombieProcess)
_POLL_S = 0.02
_TREE_EVERY_S = 0.25


def adopt_orphans() -> None:
    """Make every orphaned descendant a child of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, signal_number: int) -> None:
    """Have the kernel signal this process when its parent dies; exit at once if that has happened already."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os._exit(128 + signal_number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "prctl")


def is_alive(process: psutil.Process) -> bool:
    """Return whether this very process still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except _GONE:
        return False


def descendants(of: int | None = None) -> list[psutil.Process]:
    """Return all living descendants of process `of`, by default of this one."""
    try:
        children = psutil.Process(of).children(recursive=True)
    except _GONE:
        return []
    return [process for process in children if is_alive(process)]


def tree(root: psutil.Process) -> set[psutil.Process]:
    """Return the process and its descendants, as far as they are alive."""
    members = set(descendants(root.pid)) if is_alive(root) else set()
    return {process for process in members | {root} if is_alive(process)}


def own(pid: int, ancestor: int | None = None) -> psutil.Process | None:
    """Return the living process with this pid; None if it has ended. Raise `ForeignProcess` if not a descendant."""
    ancestor = os.getpid() if ancestor is None else ancestor
    try:
        process = psutil.Process(pid)
        if ancestor not in {parent.pid for parent in process.parents()}:
            raise ForeignProcess(f"process {pid} was not started by this agent", do="end it yourself if it is yours")
        return process if is_alive(process) else None
    except _GONE:
        return None


def signal_to(processes: Iterable[psutil.Process], number: int) -> None:
    """Send a signal to those of the processes that are still alive."""
    for process in processes:
        with contextlib.suppress(*_GONE, PermissionError, psutil.AccessDenied):
            process.send_signal(number)


async def end(root: psutil.Process, grace_s: float, give_up_s: float = 30.0) -> list[psutil.Process]:
    """End a member: SIGTERM, and after `grace_s` SIGKILL to its tree; return what is alive after `give_up_s`."""
    members = tree(root)
    if grace_s > 0 and is_alive(root):
        signal_to([root], 15)
        members |= await _wait_for(root, grace_s)
    return await kill(members, give_up_s)


async def _wait_for(root: psutil.Process, timeout_s: float) -> set[psutil.Process]:
    """Wait until a process has ended, at most `timeout_s`; return the tree that it had meanwhile."""
    members: set[psutil.Process] = set()
    deadline = time.monotonic() + timeout_s
    look_at = 0.0
    while is_alive(root) and time.monotonic() < deadline:
        if time.monotonic() >= look_at:
            members |= tree(root)
            look_at = time.monotonic() + _TREE_EVERY_S
        await asyncio.sleep(_POLL_S)
    return members


async def kill(processes: Collection[psutil.Process], give_up_s: float) -> list[psutil.Process]:
    """Kill the processes and all descendants until none is left; return those alive after `give_up_s`."""
    remaining = set(processes)
    deadline = time.monotonic() + give_up_s
    while True:
        remaining = set().union(*(tree(process) for process in remaining)) if remaining else set()
        if not remaining or time.monotonic() > deadline:
            return sorted(remaining, key=lambda process: process.pid)
        signal_to(remaining, 9)
        await asyncio.sleep(_POLL_S)


def reap_all() -> None:
    """Collect every child that has ended, so that no zombie stays."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def kill_descendants() -> None:
    """Kill all descendants of this process; return when none is left, however long that takes.

    Requires `adopt_orphans`: orphans become children of this process, so the next walk finds them.
    """
    pause_s = 0.002
    while True:
        reap_all()
        remaining = descendants()
        if not remaining:
            return
        signal_to(remaining, 9)
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.1)
