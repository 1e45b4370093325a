"""Removal of the directories of ended coordinators, with the runs that they hold.

A coordinator keeps everything about its runs in one directory: journal, logs, checkpoints. Its runs are therefore
removed together. The directory of a live coordinator must never go: the removal takes the lock that a coordinator holds
on its journal for as long as it runs, and keeps the lock until the files are gone, so that no coordinator can start
there meanwhile. A coordinator that died under a living supervisor is about to be restarted, and counts as live.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from shoal.errors import HomeUnusable, RunStillActive, ShoalError
from shoal.launch import run_lookup
from shoal.launch.offline_records import OfflineRecords
from shoal.store import journal

DAY_S = 86400.0


class EndedDirectory(msgspec.Struct, frozen=True):
    """The directory of an ended coordinator: its runs, when it was last written to, and the size of its files."""

    directory: str
    runs: tuple[str, ...]
    last_at: float
    size_bytes: int


def find_old(home: Path, older_than_s: float, now: float | None = None) -> list[EndedDirectory]:
    """Return the directories of ended coordinators that were last written to before that time, oldest first."""
    until = (time.time() if now is None else now) - older_than_s
    root = home / "coordinators"
    candidates = [path for path in root.iterdir() if not path.is_symlink()] if root.is_dir() else []
    # A directory without a journal may belong to a coordinator that is just starting.
    ended = [path for path in candidates if (path / journal.FILE).is_file() and not _is_live(path)]
    return sorted(
        (describe(path) for path in ended if _last_at(path) <= until), key=lambda directory: directory.last_at
    )


def describe(directory: Path) -> EndedDirectory:
    """Return what is in the directory of an ended coordinator; without names of runs if its records are unreadable."""
    runs: tuple[str, ...] = ()
    with suppress(ShoalError):
        runs = tuple(view.run for view in OfflineRecords(directory).runs())
    return EndedDirectory(str(directory), runs, _last_at(directory), _size(directory))


def remove(directory: Path) -> None:
    """Remove the directory of an ended coordinator; raise RunStillActive if a coordinator uses it after all."""
    with _locked(directory) as locked:
        if not locked or run_lookup.is_supervised(directory):
            raise RunStillActive(
                f"coordinator {directory.name} is still running",
                where=str(directory),
                do="stop its runs first: shoal stop RUN",
            )
        try:
            shutil.rmtree(directory)
        except OSError as error:
            raise HomeUnusable(
                f"cannot remove {directory}", why=error.strerror or str(error), do="check its owner and permissions"
            ) from error


def _is_live(directory: Path) -> bool:
    with _locked(directory) as locked:
        return not locked or run_lookup.is_supervised(directory)


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Hold the lock of a coordinator's directory; yield whether it was free."""
    try:
        descriptor = os.open(directory / journal.LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


def _last_at(directory: Path) -> float:
    try:
        return (directory / journal.FILE).stat().st_mtime
    except OSError:
        return time.time()


def _size(directory: Path) -> int:
    """Return the size of all files below a directory, in bytes."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total
