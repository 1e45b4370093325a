"""Log files: the output of each member of a run, and of all of them in the order of arrival.

A file that reaches `MAX_FILE_BYTES` becomes the previous one, in place of an earlier one, and a new file begins, so the
output of a run can never fill the disk of the journal::

    logs/NAME.log      the latest lines
    logs/NAME.log.1    the lines before them
    logs/NAME.start    at which position NAME.log begins

Readers address lines by their position in all that was ever written, so one that follows a log does not notice the
change; one that is too far behind continues with the oldest lines that are left. No line uses the disk's reserve.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal.coordinator.storage import disk_reserve
from shoal.wire.api import LogPage

ALL = "all"
MAX_FILE_BYTES = 64 << 20
MAX_OPEN = 256
MAX_FILE_NAME = 200
MAX_PAGE_BYTES = 4 << 20
BLOCK_BYTES = 64 << 10


class Logs:
    """Writer of the log files of all runs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # By use: the one that was not written for the longest time first.
        self._files: dict[Path, IO[bytes]] = {}

    def append(self, run: str, member: str, lines: Iterable[str]) -> None:
        """Append lines to the member's log and to the log of all; raise OSError."""
        clean = [line.replace("\n", " ").replace("\r", " ") for line in lines]
        folder = self._directory / "runs" / run / "logs"
        own_text = "".join(f"{line}\n" for line in clean)
        all_text = "".join(f"{member}\t{line}\n" for line in clean)
        own, joint = own_text.encode(), all_text.encode()
        disk_reserve.require(self._directory, len(own) + len(joint))
        self._write(folder / f"{file_name(member)}.log", own)
        self._write(folder / f"{ALL}.log", joint)

    def _write(self, path: Path, data: bytes) -> None:
        file = self._open(path)
        start = file.seek(0, os.SEEK_END)
        if start and start + len(data) > MAX_FILE_BYTES:
            self._files.pop(path).close()
            _rotate(path, start)
            file, start = self._open(path), 0
        if file.write(data) < len(data):
            # The disk is full: a partial line would be joined to the next one.
            file.truncate(start)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def _open(self, path: Path) -> IO[bytes]:
        file = self._files.pop(path, None)
        if file is None:
            if len(self._files) >= MAX_OPEN:
                self._files.pop(next(iter(self._files))).close()
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._files[path] = file
        return file

    def close(self, run: str = "") -> None:
        """Close the files of a run, or of all runs."""
        for path in [p for p in self._files if not run or p.parent.parent.name == run]:
            self._files.pop(path).close()


def file_name(member: str) -> str:
    """Return the name of a member's log, without suffix: its own, also if only the alphabet tells members apart.

    >>> file_name("lab-1/0")
    'lab-1_0'
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "_", member)[:MAX_FILE_NAME]
    is_plain = name != ALL and re.fullmatch(rf"[A-Za-z0-9._/-]{{1,{MAX_FILE_NAME}}}", member)
    return name if is_plain else f"{name}-{zlib.crc32(member.encode()):08x}"


@dataclass(frozen=True, slots=True)
class _Segment:
    """One file of a log, and the position of its first byte."""

    path: Path
    start: int
    size: int


def page(directory: Path, run: str, member: str = "", after: int = 0, limit: int = 1000) -> LogPage:
    """Return the lines of a run from position `after` on, in bytes; a negative `after` means the last so many lines."""
    path = directory / "runs" / run / "logs" / f"{file_name(member) if member else ALL}.log"
    segments = _segments(path)
    if not segments:
        return LogPage((), max(0, after))
    end = segments[-1].start + segments[-1].size
    at = _position_of_last(segments, -after) if after < 0 else min(max(after, segments[0].start), end)
    data = b"".join(_read(segment, at) for segment in segments)[:MAX_PAGE_BYTES]
    lines = data.split(b"\n")[:-1][:limit]
    position = at + sum(len(line) + 1 for line in lines)
    return LogPage(tuple(_pair(line, member) for line in lines), position)


def _read(segment: _Segment, at: int) -> bytes:
    """Return what a file has from a position on, as far as a page can hold it."""
    offset = max(0, at - segment.start)
    if offset >= segment.size:
        return b""
    with open(segment.path, "rb") as file:
        file.seek(offset)
        return file.read(min(MAX_PAGE_BYTES, segment.size - offset))


def _rotate(path: Path, size: int) -> None:
    start_file, part = path.with_suffix(".start"), path.with_suffix(".part")
    part.write_text(f"{_start_of(path) + size}\n", "ascii")
    os.replace(part, start_file)
    os.replace(path, path.with_suffix(".log.1"))


def _start_of(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(path.with_suffix(".start").read_text("ascii"))
    return 0


def _segments(path: Path) -> list[_Segment]:
    """Return the files of a log, the oldest first."""
    start = _start_of(path)
    segments = []
    for file, is_previous in ((path.with_suffix(".log.1"), True), (path, False)):
        with contextlib.suppress(FileNotFoundError):
            size = file.stat().st_size
            segments.append(_Segment(file, max(0, start - size) if is_previous else start, size))
    return segments


def _pair(line: bytes, member: str) -> tuple[str, str]:
    text = line.decode("utf-8", "replace")
    if member:
        return member, text
    name, _, line_text = text.partition("\t")
    return name, line_text


def _position_of_last(segments: list[_Segment], count: int) -> int:
    """Return the position at which the last `count` lines begin."""
    for segment in reversed(segments):
        with open(segment.path, "rb") as file:
            offset, missing = _offset_of_last(file, segment.size, count)
        if not missing:
            return segment.start + offset
        count = missing
    return segments[0].start


def _offset_of_last(file: IO[bytes], size: int, count: int) -> tuple[int, int]:
    """Return where the last `count` lines of a file begin, after the newline before them, and how many it lacks."""
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
            return start + at + 1, 0
        newlines, end = newlines - in_block, start
    return 0, newlines - 1
