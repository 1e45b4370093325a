"""The journal of a coordinator: every event, one JSON object a line, append-only. It is the truth.

A line is ``{"seq": 7, "at": 1700000000.0, "run": "train-7f3k", "kind": "MemberConnected", "fields": {…}}``. It is
handed to the operating system in one write before the event is acted on, and forced to the disk within a second.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from shoal.errors import JournalDamaged, JournalLocked, JournalUnwritable

FILE = "journal.jsonl"
SYNC_EVERY_S = 1.0


class JournalEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line: what happened to which run, and when. `fields` are those of the event named by `kind`."""

    seq: int
    at: float
    run: str
    kind: str
    fields: dict[str, Any]


_decoder = msgspec.json.Decoder(JournalEntry)
_encoder = msgspec.json.Encoder()


def encode_event(seq: int, at: float, run: str, event: object) -> JournalEntry:
    return JournalEntry(seq, at, run, type(event).__name__, msgspec.to_builtins(event))


def decode_event(entry: JournalEntry, kinds: Mapping[str, type]) -> Any:
    """The event that an entry holds."""
    kind = kinds.get(entry.kind)
    if kind is None:
        raise JournalDamaged(
            f"the journal holds an event of an unknown kind, {entry.kind}",
            where=f"event {entry.seq}",
            do="use the version of Shoal that wrote it, or a newer one",
        )
    try:
        return msgspec.convert(entry.fields, kind)
    except msgspec.ValidationError as error:
        raise JournalDamaged(
            "an event of the journal cannot be read", where=f"event {entry.seq}", why=str(error)
        ) from error


def read(path: Path) -> Iterator[JournalEntry]:
    """All entries; a last line that was torn by a crash is left out, damage elsewhere is an error."""
    for entry, _ in _scan(path):
        yield entry


def _scan(path: Path) -> Iterator[tuple[JournalEntry, int]]:
    """Entries, each with the offset at which its line ends."""
    offset = 0
    expected = 1
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                entry = _decoder.decode(line)
            except msgspec.DecodeError as error:
                if file.read(1) == b"":
                    return
                _damaged(path, number, str(error))
            if entry.seq != expected:
                _damaged(path, number, f"event {entry.seq} stands where event {expected} should")
            expected += 1
            yield entry, offset


def _damaged(path: Path, number: int, why: str) -> NoReturn:
    raise JournalDamaged(
        f"the journal is damaged in line {number}",
        where=str(path),
        why=why,
        do="restore the file from a copy, or move the directory away and start anew",
    )


class Journal:
    """The journal of one directory, open for appending and locked against a second coordinator."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self._lock = _lock(directory)
        try:
            self.entries = self._open()
        except BaseException:
            os.close(self._lock)
            raise
        self.seq = self.entries[-1].seq if self.entries else 0
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._syncer = threading.Thread(target=self._sync, name="journal-sync", daemon=True)
        self._syncer.start()

    def _open(self) -> list[JournalEntry]:
        """Read what is there, cut off a torn last line, and stand at the end."""
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            found = list(_scan(self.path))
            self._end = found[-1][1] if found else 0
            os.ftruncate(self._file, self._end)
            os.lseek(self._file, self._end, os.SEEK_SET)
        except OSError as error:
            os.close(self._file)
            raise _unwritable(self.path, error) from error
        except JournalDamaged:
            os.close(self._file)
            raise
        return [entry for entry, _ in found]

    def append(self, run: str, event: object, at: float) -> JournalEntry:
        """Write the event down; when this returns, a crash of this process cannot undo it."""
        entry = encode_event(self.seq + 1, at, run, event)
        line = _encoder.encode(entry) + b"\n"
        try:
            written = os.write(self._file, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, "the disk took only a part of the line")
        except OSError as error:
            self._take_back()
            raise _unwritable(self.path, error) from error
        self._end += len(line)
        self.seq += 1
        self._dirty.set()
        return entry

    def _take_back(self) -> None:
        """Remove what a failed write left behind, so that the next one starts a line of its own."""
        os.lseek(self._file, self._end, os.SEEK_SET)
        # What a disk in trouble does not let us cut off is a torn last line, until it is written over.
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, self._end)

    def _sync(self) -> None:
        while not self._closing.wait(SYNC_EVERY_S):
            if self._dirty.is_set():
                self._dirty.clear()
                _fsync(self._file)

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._syncer.join()
        _fsync(self._file)
        os.close(self._file)
        os.close(self._lock)


def _fsync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError:
        # The line is with the operating system; the next append says if the disk is in trouble.
        return


def _lock(directory: Path) -> int:
    path = directory / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise JournalLocked(
            "another coordinator works in this directory",
            where=str(directory),
            do="stop it, or give this one another directory with --dir",
        ) from error
    return descriptor


def _unwritable(path: Path, error: OSError) -> JournalUnwritable:
    return JournalUnwritable(
        "the coordinator cannot write its journal",
        where=str(path),
        why=error.strerror or str(error),
        do="make room on the disk or mend its permissions; training goes on meanwhile, but nothing can join or leave",
    )


def latest_time(entries: Iterable[JournalEntry]) -> float:
    """The time of the newest entry."""
    return max((entry.at for entry in entries), default=0.0)
