"""Orphan cleanup: ends what an agent of the same directory left behind when it was killed together with its zygote.

The kernel has killed its members by then. But the processes that these had started belong to no agent's tree any more,
and only the next agent in the directory can end them. It finds them by a mark in their environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

import psutil

from shoal.agent.processes import process_tree

# In the environment of all that an agent starts: /proc shows a fork with the environment of the zygote.
MARK = "SHOAL_AGENT_DIR"
_GIVE_UP_S = 10.0


def hold(directory: Path) -> int | None:
    """Lock the directory; return the descriptor that holds the lock, None if another agent has it."""
    try:
        descriptor = os.open(directory / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


async def clean_up_after(directory: Path) -> None:
    """Kill what an earlier agent started; the caller must hold the directory, and have started nothing yet."""
    deadline = time.monotonic() + _GIVE_UP_S
    while (orphans := _orphans_of(directory)) and time.monotonic() < deadline:
        await process_tree.kill(orphans, 1.0)


def _orphans_of(directory: Path) -> list[psutil.Process]:
    own = psutil.Process()
    spared = {own.pid, *(parent.pid for parent in own.parents())}
    orphans = []
    for process in psutil.process_iter():
        # Processes of other users, or that have just ended, cannot be read.
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid not in spared and process.environ().get(MARK) == str(directory):
                orphans.append(process)
    return [process for process in orphans if process_tree.is_alive(process)]
