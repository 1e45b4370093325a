"""Directories of ended allocations, removed once no engine needs them.

Several engines may keep allocations below one directory. An agent that may be alive has its token there, and each
engine removes the tokens of its own agents that have ended. So any engine may remove a directory that has no token and
was not written to for `KEEP_S`.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from shoal.engines.agent_script import KEEP_S

TOKEN = "token"


def homes(root: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield tag, name and path of every allocation's directory."""
    for tag in sorted(root.iterdir()) if root.is_dir() else ():
        for home in sorted(tag.iterdir()) if tag.is_dir() else ():
            if home.is_dir() and not home.is_symlink():
                yield tag.name, home.name, home


def is_old(home: Path, now: float) -> bool:
    """Return whether no file in it was written for `KEEP_S`; removed files do not count."""
    times = []
    for path in home.iterdir():
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return now - max(times or [home.stat().st_mtime]) > KEEP_S


def remove(root: Path, tag: str, active: Collection[str], now: float) -> list[str]:
    """Remove old directories without a token, but for the `active` allocations of this tag; return their names."""
    removed = []
    for owner, allocation, home in homes(root):
        if (owner == tag and allocation in active) or (home / TOKEN).exists() or not is_old(home, now):
            continue
        shutil.rmtree(home, ignore_errors=True)
        removed.append(f"{owner}/{allocation}")
        with contextlib.suppress(OSError):
            home.parent.rmdir()
    return removed
