"""Log tail: follows what members print to their files, and cuts it into bounded batches of clean lines.

The file has everything. The coordinator gets at most `LINES_PER_S`, with a mark where lines were left out, but always
the last lines before an exit.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from pathlib import Path

from shoal.core.nouns import be, counted

LINE_CHARACTERS = 2000
BATCH_LINES = 200
BATCH_CHARACTERS = 64 << 10
LINES_PER_S = 500.0
BURST_LINES = 2000.0
LAST_LINES = 100
_READ_BYTES = 256 << 10
_PENDING_BYTES = 64 << 10
_BEHIND_BYTES = 4 << 20
# Tabs and the escape character of colours stay; other control characters could disturb a terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f\u0080-\u009f]")


class LineSplitter:
    """Turns chunks of bytes into clean lines; keeps the last, unfinished one."""

    def __init__(self) -> None:
        self._pending = b""
        self._skipped = 0

    def feed(self, data: bytes) -> list[str]:
        """Add bytes; return the lines that they complete."""
        *whole, rest = (self._pending + data).split(b"\n")
        lines = [self._clean(line) for line in whole]
        # A progress bar rewrites its line with \r for hours: keep only its latest state.
        rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        if len(rest) > _PENDING_BYTES:
            self._skipped += len(rest) - LINE_CHARACTERS * 4
            rest = rest[: LINE_CHARACTERS * 4]
        self._pending = rest
        return lines

    def finish(self) -> list[str]:
        """Return the unfinished line at the end of the file, if any."""
        rest, self._pending = self._pending, b""
        return [self._clean(rest)] if rest else []

    def _clean(self, raw: bytes) -> str:
        raw = raw.rstrip(b"\r")
        raw = raw[raw.rfind(b"\r") + 1 :]
        skipped, self._skipped = self._skipped, 0
        text = _CONTROL.sub("\ufffd", raw.decode("utf-8", "replace"))
        if len(text) <= LINE_CHARACTERS and not skipped:
            return text
        return f"{text[:LINE_CHARACTERS]}… ({len(text) - LINE_CHARACTERS + skipped} more)"


class LogRateLimit:
    """Token bucket that limits the lines a member may send."""

    def __init__(self, per_s: float = LINES_PER_S, burst: float = BURST_LINES) -> None:
        self._per_s = per_s
        self._burst = burst
        self._tokens = burst
        self._at = 0.0
        self._dropped = 0
        self._last_dropped: deque[str] = deque(maxlen=LAST_LINES)

    def admit(self, lines: list[str], now: float, last: bool = False) -> list[str]:
        """Return the lines that may be sent, with a mark where some were dropped; with `last`, also the last lines."""
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._per_s)
        self._at = now
        admitted = lines[: int(self._tokens)]
        self._tokens -= len(admitted)
        sent: list[str] = []
        if admitted:
            sent = [*self._mark(self._dropped), *admitted]
            self._dropped = 0
            self._last_dropped.clear()
        self._dropped += len(lines) - len(admitted)
        self._last_dropped.extend(lines[len(admitted) :])
        if last:
            sent += [*self._mark(self._dropped - len(self._last_dropped)), *self._last_dropped]
        return sent

    @staticmethod
    def _mark(dropped: int) -> list[str]:
        return [f"… {counted(dropped, 'line')} {be(dropped)} in the member's file only"] if dropped else []


def batches(lines: list[str]) -> list[tuple[str, ...]]:
    """Cut lines into batches that fit into one message each."""
    full: list[tuple[str, ...]] = []
    batch: list[str] = []
    size = 0
    for line in lines:
        if batch and (len(batch) >= BATCH_LINES or size + len(line) > BATCH_CHARACTERS):
            full.append(tuple(batch))
            batch, size = [], 0
        batch.append(line)
        size += len(line)
    return [*full, tuple(batch)] if batch else full


class LogTail:
    """Reader that follows one member's log file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._lines = LineSplitter()
        self._rate_limit = LogRateLimit()
        self._last_line = ""

    @property
    def last_line(self) -> str:
        """The last line that was not empty."""
        return self._last_line

    def read(self, now: float, last: bool = False) -> list[str]:
        """Return new lines since the last call; with `last`, read to the end of the file."""
        lines: list[str] = []
        # The file may not exist yet, and a disk may fail: that may cost lines, but not the agent.
        with contextlib.suppress(OSError):
            lines += self._catch_up()
            while data := self._read_some():
                lines += self._lines.feed(data)
                if not last:
                    break
        if last:
            lines += self._lines.finish()
        self._last_line = next((line.strip() for line in reversed(lines) if line.strip()), self._last_line)
        return self._rate_limit.admit(lines, now, last) if lines or last else []

    def _catch_up(self) -> list[str]:
        """Skip ahead if a member writes faster than we read; start over if the file was truncated."""
        if self._descriptor is None:
            return []
        position, size = os.lseek(self._descriptor, 0, os.SEEK_CUR), os.fstat(self._descriptor).st_size
        if size < position:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
        if size - position <= _BEHIND_BYTES:
            return []
        os.lseek(self._descriptor, size - _READ_BYTES, os.SEEK_SET)
        rest = self._lines.finish()
        return [*rest, f"… {size - _READ_BYTES - position} bytes are in the member's file only"]

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _read_some(self) -> bytes:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return os.read(self._descriptor, _READ_BYTES)
