"""What members print: whole in files, and in bounded batches of clean lines to the coordinator."""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from pathlib import Path

LINE_CHARACTERS = 2000
BATCH_LINES = 200
BATCH_CHARACTERS = 64 << 10
LINES_PER_S = 500.0
BURST_LINES = 2000.0
LAST_LINES = 100
_READ_BYTES = 256 << 10
_PENDING_BYTES = 64 << 10
_BEHIND_BYTES = 4 << 20
# Tabs and the escape of colours stay; whatever else moves the cursor or rings a bell goes.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f\u0080-\u009f]")


class LineSplitter:
    """Turns bytes as they come into clean lines; holds back the last, unfinished one."""

    def __init__(self) -> None:
        self._pending = b""
        self._skipped = 0

    def feed(self, data: bytes) -> list[str]:
        *whole, rest = (self._pending + data).split(b"\n")
        lines = [self._clean(line) for line in whole]
        # A progress bar rewrites its line with \r for hours: only what it shows now is kept.
        rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        if len(rest) > _PENDING_BYTES:
            self._skipped += len(rest) - LINE_CHARACTERS * 4
            rest = rest[: LINE_CHARACTERS * 4]
        self._pending = rest
        return lines

    def finish(self) -> list[str]:
        """What is left when nothing more comes."""
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
    """How many lines a member may still send now; it refills with time."""

    def __init__(self, per_s: float = LINES_PER_S, burst: float = BURST_LINES) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._at = 0.0
        self._dropped = 0
        self._held: deque[str] = deque(maxlen=LAST_LINES)

    def pass_on(self, lines: list[str], now: float, last: bool = False) -> list[str]:
        """Those lines that may go, with a mark where some were left out; the last words of all always go."""
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._per_s)
        self._at = now
        passed = lines[: int(self._left)]
        self._left -= len(passed)
        shown: list[str] = []
        if passed:
            shown = [*self._mark(self._dropped), *passed]
            self._dropped = 0
            self._held.clear()
        self._dropped += len(lines) - len(passed)
        self._held.extend(lines[len(passed) :])
        if last:
            shown += [*self._mark(self._dropped - len(self._held)), *self._held]
        return shown

    @staticmethod
    def _mark(dropped: int) -> list[str]:
        return [f"… {dropped} lines are in the member's file only"] if dropped else []


def batches(lines: list[str]) -> list[tuple[str, ...]]:
    """Cut lines into batches that fit into one message."""
    found: list[tuple[str, ...]] = []
    batch: list[str] = []
    size = 0
    for line in lines:
        if batch and (len(batch) >= BATCH_LINES or size + len(line) > BATCH_CHARACTERS):
            found.append(tuple(batch))
            batch, size = [], 0
        batch.append(line)
        size += len(line)
    return [*found, tuple(batch)] if batch else found


class LogTail:
    """Follows one member's file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._lines = LineSplitter()
        self._allowance = LogRateLimit()
        self._last = ""

    @property
    def last_words(self) -> str:
        """The last line that was not empty."""
        return self._last

    def read(self, now: float, last: bool = False) -> list[str]:
        """New lines since the last call; with `last`, all that is left."""
        lines: list[str] = []
        # There is no file before the start, and a disk may fail: that costs lines, but must not cost the agent.
        with contextlib.suppress(OSError):
            lines += self._catch_up()
            while data := self._read_some():
                lines += self._lines.feed(data)
                if not last:
                    break
        if last:
            lines += self._lines.finish()
        self._last = next((line.strip() for line in reversed(lines) if line.strip()), self._last)
        return self._allowance.pass_on(lines, now, last) if lines or last else []

    def _catch_up(self) -> list[str]:
        """Skip what nobody could read anyway if a member writes too fast for us; begin anew if it was emptied."""
        if self._descriptor is None:
            return []
        here, size = os.lseek(self._descriptor, 0, os.SEEK_CUR), os.fstat(self._descriptor).st_size
        if size < here:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
        if size - here <= _BEHIND_BYTES:
            return []
        os.lseek(self._descriptor, size - _READ_BYTES, os.SEEK_SET)
        rest = self._lines.finish()
        return [*rest, f"… {size - _READ_BYTES - here} bytes are in the member's file only"]

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _read_some(self) -> bytes:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return os.read(self._descriptor, _READ_BYTES)
