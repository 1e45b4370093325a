"""Tracebacks in the output of members: shown once while they arrive, and kept for the summary.

A mistake in a script makes all its members raise alike. `TracebackLog` reads their output line by line and recognises
Python's tracebacks: the head line, indented frames, and the first line without indentation, which names the exception.
A traceback is held back until it is complete; if it equals an earlier one, a single line refers to that instead.
Nothing else is held back, and `flush` returns what was incomplete when the output ended.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HEAD = "Traceback (most recent call last):"
# Lines that connect two tracebacks of one failure.
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+)', re.MULTILINE)
LIBRARIES = re.compile(r"/(site-packages|dist-packages|lib/python3\.\d+)/|^<")
PACKAGE = f"{Path(__file__).parents[2]}/"
LINES_SHOWN = 40

LogLines = list[tuple[str, str]]


@dataclass
class MemberTraceback:
    """A member's latest traceback. It is complete when the exception is named, closed when other output follows.

    Between the two come further lines of the message, and what connects it to the next traceback of a chain.
    """

    member: str
    lines: list[str] = field(default_factory=list)
    complete: bool = False
    closed: bool = False
    collapsed: bool = False

    @property
    def chained(self) -> bool:
        """Whether the next traceback belongs to the same failure."""
        return not self.closed and any(line.startswith(CHAINED) for line in self.lines[-2:])

    @property
    def text(self) -> str:
        """All lines; of a very long traceback the last ones, which are closest to the error."""
        lines = "\n".join(self.lines).rstrip().split("\n")
        return "\n".join([HEAD, "  ...", *lines[-LINES_SHOWN:]] if len(lines) > LINES_SHOWN + 2 else lines)


class TracebackLog:
    """The latest traceback of each member; with `collapse`, repeated ones become one line of the output."""

    def __init__(self, collapse: bool = True) -> None:
        self._collapse = collapse
        self._latest: dict[str, MemberTraceback] = {}
        self._first: dict[str, MemberTraceback] = {}

    def add(self, lines: Sequence[tuple[str, str]]) -> LogLines:
        """Read further output of members; return what of it to show now."""
        shown = [line for member, text in lines for line in self._read(member, text)]
        return shown if self._collapse else list(lines)

    def flush(self) -> LogLines:
        """Return the lines that were held back and never completed."""
        return [line for traceback in self._latest.values() for line in self._held_back(traceback)]

    def of(self, member: str) -> str:
        """Return a member's latest traceback, "" if it has printed none."""
        return self._latest[member].text if member in self._latest else ""

    def _read(self, member: str, text: str) -> LogLines:
        latest = self._latest.get(member)
        if text == HEAD:
            chained = latest is not None and latest.chained
            before = latest.lines if latest is not None and chained else []
            collapsed = latest is not None and chained and latest.collapsed
            self._latest[member] = MemberTraceback(member, [*before, text], collapsed=collapsed)
            return self._held_back(latest) if latest is not None else []
        if latest is None or latest.closed:
            return [(member, text)]
        if latest.complete:
            return self._after(latest, text)
        latest.lines.append(text)
        latest.complete = bool(text) and not text.startswith((" ", "\t"))
        return self._completed(latest) if latest.complete else []

    def _completed(self, traceback: MemberTraceback) -> LogLines:
        first = self._first.setdefault("\n".join(traceback.lines), traceback)
        if first is traceback:
            traceback.collapsed = False
            start = max(index for index, line in enumerate(traceback.lines) if line == HEAD)
            return [(traceback.member, line) for line in traceback.lines[start:]]
        if traceback.collapsed:
            return []  # the first traceback of the chain was replaced already
        traceback.collapsed = True
        other = "before" if first.member == traceback.member else first.member
        return [(traceback.member, f"(same traceback as {other})")]

    def _after(self, traceback: MemberTraceback, text: str) -> LogLines:
        follows = CHAINED if not traceback.lines[-1] else (" ", *CHAINED)
        if text and not text.startswith(follows):
            traceback.closed = True
            return [(traceback.member, text)]
        traceback.lines.append(text)
        return [] if traceback.collapsed else [(traceback.member, text)]

    def _held_back(self, traceback: MemberTraceback) -> LogLines:
        if traceback.complete or not self._collapse:
            return []
        traceback.complete = traceback.closed = True
        return [(traceback.member, line) for line in traceback.lines]


def user_frame(traceback: str) -> str:
    """Return the innermost frame of the user's code as "FILE:LINE: SOURCE"; "" if the traceback has no frame.

    >>> user_frame('Traceback (most recent call last):\\n  File "/a/train.py", line 2, in f\\n    x()\\nValueError: no')
    '/a/train.py:2: x()'
    """
    lines = traceback.splitlines()
    frames = [(index, match) for index, line in enumerate(lines) if (match := FRAME.match(line))]
    own = [frame for frame in frames if not _is_library(frame[1]["file"])] or frames
    if not own:
        return ""
    index, match = own[-1]
    source = lines[index + 1].strip() if index + 1 < len(lines) and lines[index + 1].startswith("    ") else ""
    return f"{match['file']}:{match['line']}" + (f": {source}" if source else "")


def _is_library(file: str) -> bool:
    return file.startswith(PACKAGE) or LIBRARIES.search(file) is not None
