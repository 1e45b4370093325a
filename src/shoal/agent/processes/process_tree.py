"""Process trees: who descends from whom, and how to end a tree so that nothing of it is left.

A pid alone is never trusted: every process is known by its pid and its start time together (psutil compares both
before it sends a signal), and only descendants of the calling process are ever signalled, but for what an agent of the
same directory left that is dead (`predecessor`).
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
_LOOK_EVERY_S = 0.02
_TREE_EVERY_S = 0.25


def adopt_orphans() -> None:
    """Make every orphaned descendant a child of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, signal_number: int) -> None:
    """Have the kernel send this signal to us when our parent dies; exit if it is dead already."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os._exit(128 + signal_number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "prctl")


def is_alive(process: psutil.Process) -> bool:
    """Whether this very process still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except _GONE:
        return False


def descendants(of: int | None = None) -> list[psutil.Process]:
    """All live processes below `of` (by default, this one)."""
    try:
        below = psutil.Process(of).children(recursive=True)
    except _GONE:
        return []
    return [process for process in below if is_alive(process)]


def tree(root: psutil.Process) -> set[psutil.Process]:
    """The process and everything below it, as far as it is alive."""
    members = set(descendants(root.pid)) if is_alive(root) else set()
    return {process for process in members | {root} if is_alive(process)}


def own(pid: int, ancestor: int | None = None) -> psutil.Process | None:
    """The live process with this pid, None if it is gone; refuses one that is not our descendant."""
    ancestor = os.getpid() if ancestor is None else ancestor
    try:
        process = psutil.Process(pid)
        if ancestor not in {parent.pid for parent in process.parents()}:
            raise ForeignProcess(f"process {pid} was not started by this agent", do="end it by hand if it is yours")
        return process if is_alive(process) else None
    except _GONE:
        return None


def signal_to(processes: Iterable[psutil.Process], number: int) -> None:
    """Send a signal to those that are still the processes that we saw."""
    for process in processes:
        with contextlib.suppress(*_GONE, PermissionError, psutil.AccessDenied):
            process.send_signal(number)


async def end(root: psutil.Process, grace_s: float, give_up_s: float = 30.0) -> list[psutil.Process]:
    """SIGTERM to the member alone so that it can hand over; after the grace SIGKILL to its tree; returns what is left.

    Its children are remembered while it lives, because once it is gone they are somebody else's.
    """
    known = tree(root)
    if grace_s > 0 and is_alive(root):
        signal_to([root], 15)
        known |= await _watch(root, grace_s)
    return await kill(known, give_up_s)


async def _watch(root: psutil.Process, for_s: float) -> set[psutil.Process]:
    known: set[psutil.Process] = set()
    deadline = time.monotonic() + for_s
    look = 0.0
    while is_alive(root) and time.monotonic() < deadline:
        if time.monotonic() >= look:
            known |= tree(root)
            look = time.monotonic() + _TREE_EVERY_S
        await asyncio.sleep(_LOOK_EVERY_S)
    return known


async def kill(processes: Collection[psutil.Process], give_up_s: float) -> list[psutil.Process]:
    """SIGKILL to these and all that they started, until none is left; what is left after `give_up_s`."""
    known = set(processes)
    deadline = time.monotonic() + give_up_s
    while True:
        known = set().union(*(tree(process) for process in known)) if known else set()
        if not known or time.monotonic() > deadline:
            return sorted(known, key=lambda process: process.pid)
        signal_to(known, 9)
        await asyncio.sleep(_LOOK_EVERY_S)


def reap_all() -> None:
    """Collect every child that has ended, so that no zombie stays."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def kill_descendants() -> None:
    """SIGKILL everything below this process and return when nothing is left, however long that takes.

    Needs `adopt_orphans`: what loses its parent comes to us, so the walk finds it the next time.
    """
    pause_s = 0.002
    while True:
        reap_all()
        left = descendants()
        if not left:
            return
        signal_to(left, 9)
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.1)
