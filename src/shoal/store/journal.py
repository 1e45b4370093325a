"""Journal of a coordinator: every event, one JSON object per line, append-only.

Theory of operation
-------------------
The journal is the only truth about a coordinator. Its state is a pure function of the events in the file: restarting is
replaying. Everything else in the directory that describes runs (the SQLite views, the event files) is derived from it
and can be deleted.

A line is ``{"seq": 7, "at": 1700000000.0, "run": "train-7f3k", "kind": "MemberConnected", "fields": {…}}``. `seq`
counts from 1 without gaps, `kind` is the class name of the event and `fields` are its attributes.

Append before act. The coordinator first appends an event and only then carries out what follows from it: messages to
members, requests to pools. If it dies in between, replay knows the event and the instructions follow again, so
receivers must tolerate a repetition. What was never written never happened.

Durability. One event is one write(2) of a whole line. When `append` returns, the line belongs to the operating system:
a crash of the coordinator cannot lose it. A thread calls fsync within a second, so a power failure can lose at most the
last second. Members then describe the present when they say hello, so that loss costs history and not correctness.

Failed writes. If the disk refuses a line, or takes only a part of it, the file is truncated to the last whole line and
JournalUnwritable is raised. The coordinator holds the event back, tells clients, and tries again later; members go on
training in their present world.

Torn last line. A crash of the machine may leave an incomplete or unreadable last line. It was never acted on, so
opening the journal removes it. An unreadable line that is followed by others, or a gap in `seq`, is damage:
JournalDamaged.

One writer. The file `lock` is locked with flock for as long as the journal is open; a second coordinator on the same
directory gets JournalLocked.

Versions. The file `format` has the protocol number and the version of Shoal that wrote the directory. Events are not
translated between protocols. A directory with another number, or with events but without that file (older versions
wrote none), is refused with DirectoryVersionMismatch.
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

import shoal
from shoal.errors import DirectoryVersionMismatch, JournalDamaged, JournalLocked, JournalUnwritable
from shoal.wire.protocol import PROTOCOL

FILE = "journal.jsonl"
LOCK_FILE = "lock"
FORMAT_FILE = "format"
SYNC_EVERY_S = 1.0


class JournalEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line: an event of `run` ("" for the coordinator itself) at `at`, in epoch seconds."""

    seq: int
    at: float
    run: str
    kind: str
    fields: dict[str, Any]


class DirectoryFormat(msgspec.Struct, frozen=True):
    """The protocol number and the version of Shoal that wrote a directory."""

    protocol: int
    shoal: str


_decoder = msgspec.json.Decoder(JournalEntry)
_encoder = msgspec.json.Encoder()


def encode_event(seq: int, at: float, run: str, event: object) -> JournalEntry:
    """Return the entry that records an event."""
    return JournalEntry(seq, at, run, type(event).__name__, msgspec.to_builtins(event))


def decode_event(entry: JournalEntry, kinds: Mapping[str, type]) -> Any:
    """Return the event of an entry; raise JournalDamaged if its kind is unknown or its fields do not match."""
    kind = kinds.get(entry.kind)
    if kind is None:
        raise JournalDamaged(
            f"unknown event {entry.kind} in the journal",
            where=f"event {entry.seq}",
            do="use the version of Shoal that wrote it, or a newer one",
        )
    try:
        return msgspec.convert(entry.fields, kind)
    except msgspec.ValidationError as error:
        raise JournalDamaged(
            "cannot decode an event of the journal", where=f"event {entry.seq}", why=str(error)
        ) from error


def read(path: Path) -> Iterator[JournalEntry]:
    """Yield all entries, without a torn last line; raise JournalDamaged if another line is unreadable."""
    for entry, _ in _scan(path):
        yield entry


def _scan(path: Path) -> Iterator[tuple[JournalEntry, int]]:
    """Yield the entries, each with the offset at which its line ends."""
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
                _damaged(path, number, f"expected event {expected}, found event {entry.seq}")
            expected += 1
            yield entry, offset


def _damaged(path: Path, number: int, why: str) -> NoReturn:
    raise JournalDamaged(
        f"line {number} of the journal is damaged",
        where=str(path),
        why=why,
        do="restore the file from a backup, or start a new coordinator in another directory",
    )


class Journal:
    """The journal of one directory, open for appending and locked against a second coordinator.

    `entries` are those that were there when it was opened; `seq` is the number of the last one.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self._lock = _lock(directory)
        try:
            _check_format(directory)
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
        """Return the existing entries; truncate a torn last line and position the file at its end."""
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            scanned = list(_scan(self.path))
            self._end = scanned[-1][1] if scanned else 0
            os.ftruncate(self._file, self._end)
            os.lseek(self._file, self._end, os.SEEK_SET)
        except OSError as error:
            os.close(self._file)
            raise _unwritable(self.path, error) from error
        except JournalDamaged:
            os.close(self._file)
            raise
        return [entry for entry, _ in scanned]

    def append(self, run: str, event: object, at: float) -> JournalEntry:
        """Write an event; once this returns, a crash of this process cannot lose it. Raise JournalUnwritable."""
        entry = encode_event(self.seq + 1, at, run, event)
        line = _encoder.encode(entry) + b"\n"
        try:
            written = os.write(self._file, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, "only part of the line was written")
        except OSError as error:
            self._undo_write()
            raise _unwritable(self.path, error) from error
        self._end += len(line)
        self.seq += 1
        self._dirty.set()
        return entry

    def _undo_write(self) -> None:
        """Remove what a failed write left behind, so that the next line starts at a line boundary."""
        os.lseek(self._file, self._end, os.SEEK_SET)
        # If the disk does not even allow this, the rest is a torn last line until the next write replaces it.
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, self._end)

    def _sync(self) -> None:
        while not self._closing.wait(SYNC_EVERY_S):
            if self._dirty.is_set():
                self._dirty.clear()
                _fsync(self._file)

    def close(self) -> None:
        """Write everything to disk and release the lock."""
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
        # The operating system has the data; the next append reports a failing disk.
        return


def _lock(directory: Path) -> int:
    path = directory / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise JournalLocked(
            "another coordinator uses this directory",
            where=str(directory),
            do="stop it, or start this one in another directory with --dir",
        ) from error
    return descriptor


def _check_format(directory: Path) -> None:
    """Write the format file of a new directory; raise DirectoryVersionMismatch if another version wrote this one."""
    path, journal = directory / FORMAT_FILE, directory / FILE
    try:
        written = msgspec.json.decode(path.read_bytes(), type=DirectoryFormat)
    except FileNotFoundError:
        if journal.exists() and journal.stat().st_size:
            raise _mismatch(directory, "an older version of Shoal") from None
        _write_format(path)
        return
    except msgspec.DecodeError as error:
        raise _mismatch(directory, f"an unknown version of Shoal ({error})") from error
    except OSError as error:
        raise _unwritable(path, error) from error
    if written.protocol != PROTOCOL:
        raise _mismatch(directory, f"Shoal {written.shoal} (protocol {written.protocol})")


def _write_format(path: Path) -> None:
    part = path.with_name(f"{FORMAT_FILE}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(DirectoryFormat(PROTOCOL, shoal.__version__)))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _mismatch(directory: Path, writer: str) -> DirectoryVersionMismatch:
    return DirectoryVersionMismatch(
        f"this directory was written by {writer}",
        where=str(directory),
        why=f"this is Shoal {shoal.__version__} (protocol {PROTOCOL}), which cannot read it",
        do="start the coordinator in a new directory, or use the version that wrote this one",
    )


def _unwritable(path: Path, error: OSError) -> JournalUnwritable:
    return JournalUnwritable(
        "the coordinator cannot write its journal",
        where=str(path),
        why=error.strerror or str(error),
        do="free disk space or fix the permissions; training continues meanwhile, but no member can join or leave",
    )


def latest_time(entries: Iterable[JournalEntry]) -> float:
    """Return the latest time of any entry, 0 if there is none."""
    return max((entry.at for entry in entries), default=0.0)
