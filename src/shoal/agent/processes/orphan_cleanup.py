"""What an agent of this directory left behind that was killed together with its warm process.

Its members have died by the kernel's hand; what those had started has nobody left to end it but the next agent here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

import psutil

from shoal.agent.processes import process_tree

# All that an agent starts has it in its environment, the warm process first: a fork shows that of its parent.
MARK = "SHOAL_AGENT_DIR"
_GIVE_UP_S = 10.0


def hold(directory: Path) -> int | None:
    """The directory is ours until this descriptor is closed, as the kernel does when we die; None if it is not."""
    try:
        held = os.open(directory / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        return None
    return held


async def clean_up_after(directory: Path) -> None:
    """End what an earlier agent started; only for who holds the directory, and has started nothing yet."""
    deadline = time.monotonic() + _GIVE_UP_S
    while (left := _left_in(directory)) and time.monotonic() < deadline:
        await process_tree.kill(left, 1.0)


def _left_in(directory: Path) -> list[psutil.Process]:
    me = psutil.Process()
    spared = {me.pid, *(parent.pid for parent in me.parents())}
    found = []
    for process in psutil.process_iter():
        # Others' processes, and those that have just ended, are not ours to look into.
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid not in spared and process.environ().get(MARK) == str(directory):
                found.append(process)
    return [process for process in found if process_tree.is_alive(process)]
