"""Disk reserve: space that only the journal may use, because nothing is decided without it."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

RESERVED_BYTES = 128 << 20


def free_bytes(directory: Path) -> int:
    """Return the free space of the disk that a directory is on, or will be on."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def require(directory: Path, size_bytes: int) -> None:
    """Raise OSError (ENOSPC) if so many bytes more would use the reserve."""
    if free_bytes(directory) - size_bytes < RESERVED_BYTES:
        raise OSError(errno.ENOSPC, f"the last {RESERVED_BYTES >> 20} MiB are reserved for the journal")
