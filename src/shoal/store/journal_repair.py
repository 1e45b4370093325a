"""Repair of a damaged journal, on request: a coordinator that cannot start is worse than one that forgot an event.

Every line that cannot be read, or whose event no longer decodes, is replaced by an `EventSkipped` with its number; so
are numbers that are missing. Lines that repeat a number are left out. `seq` stays without gaps, the story shows what
was skipped, and the damaged file is kept beside the repaired one as ``journal.jsonl.damaged``. A damaged snapshot is
replaced by an empty state, and the runs that it held are forgotten; their files, checkpoints and logs stay.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.errors import JournalDamaged, JournalUnwritable
from shoal.store import journal
from shoal.store.journal import JournalEntry, JournalSnapshot

DAMAGED = ".damaged"
SKIPPED_KIND = "EventSkipped"
# More missing numbers than this are not filled one by one: the file is another journal's.
MAX_MISSING = 100_000
SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class SkippedLine:
    """What was skipped: line `line` of the journal, event `seq` (0 if unknown), why, and the beginning of its text."""

    line: int
    seq: int
    why: str
    text: str = ""


def repair(
    directory: Path, check: Callable[[JournalEntry], object], check_state: Callable[[bytes], object]
) -> list[SkippedLine]:
    """Replace what is unreadable in the journal of a directory and return it.

    `check` raises JournalDamaged for an entry whose event does not decode, `check_state` for the body of a snapshot
    that does not. Raise JournalLocked, DirectoryVersionMismatch or JournalUnwritable.
    """
    descriptor = journal.lock(directory)
    try:
        journal.check_format(directory)
        return _Repair(directory, check, check_state).run()
    finally:
        os.close(descriptor)


class _Repair:
    def __init__(
        self, directory: Path, check: Callable[[JournalEntry], object], check_state: Callable[[bytes], object]
    ) -> None:
        self._directory, self._check, self._check_state = directory, check, check_state
        self._path = directory / journal.FILE
        self._skipped: list[SkippedLine] = []
        self._at = 0.0

    def run(self) -> list[SkippedLine]:
        lines = list(self._read())
        start, snapshot = self._repair_snapshot([entry for entry, _ in lines if entry is not None])
        entries = list(self._renumber(lines, start))
        if self._skipped:
            if snapshot is not None:
                _keep(self._directory / journal.SNAPSHOT_FILE)
                journal.write_snapshot(self._directory, snapshot)
            _keep(self._path)
            journal.replace_file(self._path, b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
        return self._skipped

    def _read(self) -> Iterator[tuple[JournalEntry | None, SkippedLine]]:
        """Yield for each line its entry, None if it cannot be read, and what to say of it if it is skipped."""
        data = self._path.read_bytes() if self._path.exists() else b""
        lines = data.split(b"\n")
        if lines[-1] != b"":
            lines[-1] = b""  # torn by a crash, and never acted on
        for number, line in enumerate(lines[:-1], start=1):
            entry, seq, why = None, 0, ""
            try:
                entry = msgspec.json.decode(line, type=JournalEntry)
                seq = entry.seq
                self._check(entry)
            except journal.UNREADABLE as error:
                why = str(error)
            except JournalDamaged as error:
                why = f"{error.what}: {error.why}" if error.why else error.what
            text = line.decode("utf-8", "backslashreplace")[:SHOWN_CHARS]
            yield (None if why else entry), SkippedLine(number, seq, why, text)

    def _repair_snapshot(self, entries: list[JournalEntry]) -> tuple[int, JournalSnapshot | None]:
        """Return the event at which the journal begins, and an empty snapshot if the one there is unreadable."""
        try:
            snapshot = journal.read_snapshot(self._directory)
            if snapshot is None:
                return 0, None
            self._check_state(snapshot.body)
        except JournalDamaged as error:
            seq, at = (entries[0].seq - 1, entries[0].at) if entries else (0, 0.0)
            self._skipped.append(SkippedLine(0, seq, f"{error.what}: {error.why}", journal.SNAPSHOT_FILE))
            return seq, JournalSnapshot(seq, at, b"")
        self._at = snapshot.at
        return snapshot.seq, None

    def _renumber(self, lines: list[tuple[JournalEntry | None, SkippedLine]], start: int) -> Iterator[JournalEntry]:
        """Yield entries without gaps, from the first that is needed on."""
        first = next((entry.seq for entry, _ in lines if entry is not None), start + 1)
        expected, waiting = min(max(first, 1), start + 1), list[SkippedLine]()
        for entry, about in lines:
            if entry is None:
                waiting.append(about)
            elif entry.seq < expected:
                self._skipped.append(
                    SkippedLine(about.line, entry.seq, "an event of this number came before", about.text)
                )
            else:
                yield from self._fill(expected, entry.seq, waiting)
                self._at, expected, waiting = entry.at, entry.seq + 1, []
                yield entry
        # The last line is torn if it cannot be decoded, and damaged if its event cannot.
        yield from self._fill(expected, expected + len(waiting), waiting)

    def _fill(self, expected: int, until: int, waiting: list[SkippedLine]) -> Iterator[JournalEntry]:
        """Yield an event for each skipped line or missing number before `until`."""
        if until - expected > MAX_MISSING:
            raise JournalUnwritable(
                "the journal cannot be repaired",
                where=str(self._path),
                why=f"events {expected} to {until - 1} are missing",
                do="restore the file from a backup, or start a new coordinator in another directory",
            )
        for index, seq in enumerate(range(expected, until)):
            about = waiting[index] if index < len(waiting) else SkippedLine(0, seq, "the line is missing")
            self._skipped.append(SkippedLine(about.line, seq, about.why, about.text))
            yield JournalEntry(seq, self._at, "", SKIPPED_KIND, {"why": about.why, "text": about.text})
        for about in waiting[max(until - expected, 0) :]:
            self._skipped.append(about)


def _keep(path: Path) -> None:
    """Rename a damaged file such that an earlier one is not overwritten."""
    if not path.exists():
        return
    kept = next(
        candidate
        for number in range(1_000_000)
        if not (candidate := path.with_name(f"{path.name}{DAMAGED}{number or ''}")).exists()
    )
    try:
        os.link(path, kept)
    except OSError as error:
        raise JournalUnwritable("cannot keep the damaged file", where=str(kept), why=str(error)) from error
