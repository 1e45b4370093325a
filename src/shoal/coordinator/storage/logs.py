"""The lines that members printed: one file for each member, and one of all in the order in which they came."""

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
    """The log files of all runs of a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[Path, IO[bytes]] = {}

    def append(self, run: str, member: str, lines: Iterable[str]) -> None:
        clean = [line.replace("\n", " ").replace("\r", " ") for line in lines]
        folder = self._directory / "runs" / run / "logs"
        own = "".join(f"{line}\n" for line in clean)
        both = "".join(f"{member}\t{line}\n" for line in clean)
        self._write(folder / f"{file_name(member)}.log", own.encode())
        self._write(folder / f"{ALL}.log", both.encode())

    def _write(self, path: Path, data: bytes) -> None:
        file = self._files.get(path)
        if file is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._files[path] = open(path, "ab", buffering=0)  # noqa: SIM115
        begins = file.seek(0, os.SEEK_END)
        if file.write(data) < len(data):
            # The disk is full: half a line would become one with the next.
            file.truncate(begins)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def close(self, run: str = "") -> None:
        for path in [p for p in self._files if not run or p.parent.parent.name == run]:
            self._files.pop(path).close()


def file_name(member: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", member)


def page(directory: Path, run: str, member: str = "", after: int = 0, limit: int = 1000) -> LogPage:
    """The lines of a run from position `after` on; a negative `after` asks for the last so many lines."""
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
    who, _, said = text.partition("\t")
    return who, said


def _position_of_last(file: IO[bytes], size: int, count: int) -> int:
    """Where the last so many lines begin: after the end of the line before them."""
    left, ends = count + 1, size
    while ends:
        begins = max(0, ends - BLOCK_BYTES)
        file.seek(begins)
        block = file.read(ends - begins)
        found = block.count(b"\n")
        if found >= left:
            at = len(block)
            for _ in range(left):
                at = block.rindex(b"\n", 0, at)
            return begins + at + 1
        left, ends = left - found, begins
    return 0
