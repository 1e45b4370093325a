"""What hires leave on a disk: their logs and projects, removed when it is certain that nobody needs them.

Many engines may keep hires below one directory. Whoever lives has its token there, and each engine removes the tokens
of its own that have ended; so what has no token, and was not touched for long, can be removed by any of them.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from shoal.engines.agent_script import KEEP_S

TOKEN = "token"


def homes(hires: Path) -> Iterator[tuple[str, str, Path]]:
    """Every directory of a hire, with its tag and name."""
    for tag in sorted(hires.iterdir()) if hires.is_dir() else ():
        for home in sorted(tag.iterdir()) if tag.is_dir() else ():
            if home.is_dir() and not home.is_symlink():
                yield tag.name, home.name, home


def is_old(home: Path, now: float) -> bool:
    """Whether nothing was written there for long; what was removed since does not count."""
    times = []
    for path in home.iterdir():
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return now - max(times or [home.stat().st_mtime]) > KEEP_S


def remove(hires: Path, tag: str, known: Collection[str], now: float) -> list[str]:
    """Remove what those left that ended long ago, but for hires of a tag that somebody counts on; their names."""
    removed = []
    for of, hire, home in homes(hires):
        if (of == tag and hire in known) or (home / TOKEN).exists() or not is_old(home, now):
            continue
        shutil.rmtree(home, ignore_errors=True)
        removed.append(f"{of}/{hire}")
        with contextlib.suppress(OSError):
            home.parent.rmdir()
    return removed
