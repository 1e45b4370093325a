"""Memory limit of a member: what its process tree uses, against what its role allows.

Members are forks of one warm process and share most of their pages with it. Resident size would count these pages for
each of them; the proportional set size (PSS) divides them among the processes that share them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import psutil

from shoal.agent.processes import process_tree
from shoal.errors import MemoryLimitExceeded

_PSS = re.compile(rb"^Pss:\s+(\d+) kB$", re.MULTILINE)


def allowed_bytes(env: Mapping[str, str]) -> int:
    """Return the limit in a member's environment; 0 for none."""
    text = env.get("SHOAL_MEMORY_BYTES", "")
    return int(text) if text.isdigit() else 0


def used_bytes(root: psutil.Process) -> int:
    """Return the memory of a process tree; pages shared with other processes count proportionally (PSS)."""
    return sum(_own_bytes(process) for process in process_tree.tree(root))


def verdict(used: int, allowed: int) -> str:
    """Return the error of a member that exceeds its limit; "" if it does not."""
    if not allowed or used <= allowed:
        return ""
    gib = 1 << 30
    limit = f"its role has {allowed / gib:.2f} GiB"
    return f"error[{MemoryLimitExceeded.code}] it used {used / gib:.2f} GiB of memory; {limit}"


def _own_bytes(process: psutil.Process) -> int:
    try:
        with open(f"/proc/{process.pid}/smaps_rollup", "rb") as file:
            pss = _PSS.search(file.read())
        return int(pss[1]) * 1024 if pss else 0
    except OSError:
        # The process has just ended, or we may not read it.
        return 0
