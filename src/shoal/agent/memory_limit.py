"""How much memory a member uses, with all that it started, and how much its role may."""

from __future__ import annotations

import re
from collections.abc import Mapping

import psutil

from shoal.agent.processes import process_tree
from shoal.errors import MemoryLimitExceeded

_PSS = re.compile(rb"^Pss:\s+(\d+) kB$", re.MULTILINE)


def allowed_bytes(env: Mapping[str, str]) -> int:
    """The limit that an order names, 0 for none."""
    text = env.get("SHOAL_MEMORY_BYTES", "")
    return int(text) if text.isdigit() else 0


def used_bytes(root: psutil.Process) -> int:
    """What a process tree costs the machine; what it shares with others counts in part."""
    return sum(_own_bytes(process) for process in process_tree.tree(root))


def verdict(used: int, allowed: int) -> str:
    """Why a member that uses so much has to go, empty if it has not."""
    if not allowed or used <= allowed:
        return ""
    gib = 1 << 30
    limit = f"its role has {allowed / gib:.2f} GiB"
    return f"error[{MemoryLimitExceeded.code}] it used {used / gib:.2f} GiB of memory; {limit}"


def _own_bytes(process: psutil.Process) -> int:
    try:
        with open(f"/proc/{process.pid}/smaps_rollup", "rb") as file:
            found = _PSS.search(file.read())
        return int(found[1]) * 1024 if found else 0
    except OSError:
        # It has just ended, or it is not ours to look into.
        return 0
