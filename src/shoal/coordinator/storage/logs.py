"""Log files: the output of each member of a run, and of all of them in the order of arrival."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from shoal.wire.api import LogPage

ALL = "all"
MAX_PAGE_BYTES = 4 << 20
BLOCK_BYTES = 64 << 10


class Logs:
    """Writer of the log files of all runs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[Path, IO[bytes]] = {}

    def append(self, run: str, member: str, lines: Iterable[str]) -> None:
        """Append lines to the member's log and to the log of all; raise OSError."""
        clean = [line.replace("\n", " ").replace("\r", " ") for line in lines]
        folder = self._directory / "runs" / run / "logs"
        own_text = "".join(f"{line}\n" for line in clean)
        all_text = "".join(f"{member}\t{line}\n" for line in clean)
        self._write(folder / f"{file_name(member)}.log", own_text.encode())
        self._write(folder / f"{ALL}.log", all_text.encode())

    def _write(self, path: Path, data: bytes) -> None:
        file = self._files.get(path)
        if file is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._files[path] = open(path, "ab", buffering=0)  # noqa: SIM115
        start = file.seek(0, os.SEEK_END)
        if file.write(data) < len(data):
            # The disk is full: a partial line would be joined to the next one.
            file.truncate(start)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def close(self, run: str = "") -> None:
        """Close the files of a run, or of all runs."""
        for path in [p for p in self._files if not run or p.parent.parent.name == run]:
            self._files.pop(path).close()


def file_name(member: str) -> str:
    """Return the name of a member's log, without suffix."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", member)


def page(directory: Path, run: str, member: str = "", after: int = 0, limit: int = 1000) -> LogPage:
    """Return the lines of a run from position `after` on, in bytes; a negative `after` means the last so many lines."""
    path = directory / "runs" / run / "logs" / f"{file_name(member) if member else ALL}.log"
    if not path.exists():
        return LogPage((), max(0, after))
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        start = _position_of_last(file, size, -after) if after < 0 else min(after, size)
        file.seek(start)
        data = file.read(MAX_PAGE_BYTES)
    lines = data.split(b"\n")[:-1][:limit]
    position = start + sum(len(line) + 1 for line in lines)
    return LogPage(tuple(_pair(line, member) for line in lines), position)


def _pair(line: bytes, member: str) -> tuple[str, str]:
    text = line.decode("utf-8", "replace")
    if member:
        return member, text
    name, _, line_text = text.partition("\t")
    return name, line_text


def _position_of_last(file: IO[bytes], size: int, count: int) -> int:
    """Return the position at which the last `count` lines begin: after the newline before them."""
    newlines, end = count + 1, size
    while end:
        start = max(0, end - BLOCK_BYTES)
        file.seek(start)
        block = file.read(end - start)
        in_block = block.count(b"\n")
        if in_block >= newlines:
            at = len(block)
            for _ in range(newlines):
                at = block.rindex(b"\n", 0, at)
            return start + at + 1
        newlines, end = newlines - in_block, start
    return 0
