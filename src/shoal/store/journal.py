"""Journal of a coordinator: every event, one JSON object per line, and a snapshot of the state they led to.

Theory of operation
-------------------
The journal is the only truth about a coordinator. Its state is a pure function of its events: restarting is replaying.

A line is ``{"seq": 7, "at": 1700000000.0, "run": "train-7f3k", "kind": "MemberConnected", "fields": {…}}``. `seq`
counts from 1 without gaps, `kind` is the class name of the event and `fields` are its attributes.

Append before act. The coordinator first appends an event and only then carries out what follows from it: messages to
members, requests to pools. If it dies in between, replay knows the event and the instructions follow again, so
receivers must tolerate a repetition. What was never written never happened.

What is written can be read. `append` decodes the line that it is about to write, and refuses an event with a value that
JSON or the views cannot hold (NaN, an infinity, an integer beyond 64 bits, a broken string) with EventUnstorable. It
does so before anything changes, so no event can keep a coordinator from starting again.

Durability. One event is one write(2) of a whole line. When `append` returns, the line belongs to the operating system:
a crash of the coordinator cannot lose it. A thread calls fsync within a second, so a power failure can lose at most the
last second. Members then describe the present when they say hello, so that loss costs history and not correctness.

Failed writes. If the disk refuses a line, or takes only a part of it, the file is truncated to the last whole line and
JournalUnwritable is raised. The coordinator holds the event back, tells clients, and tries again later; members go on
training in their present world.

Snapshot and truncation. Replaying every event since the beginning would take longer each day, so from time to time the
state itself is stored and the lines before it are dropped (`coordinator.compaction` decides when). It takes two steps:

1. `write_snapshot` writes ``journal.snapshot.part``, syncs it, and renames it to ``journal.snapshot``. The file says
   after which event, `seq`, the state was taken. It has a checksum, because it replaces events.
2. `drop_before` writes the lines after that event to ``journal.jsonl.part`` and renames it to ``journal.jsonl``.

Readers skip all lines up to the snapshot's `seq`, so a crash at any point leaves a directory that starts: before the
first rename the old snapshot and all lines since are there; between the renames, lines are there that the snapshot
contains; an unfinished ``.part`` file is never read. A power failure may bring back a journal that ends before the
snapshot does: then the snapshot alone is the state, and opening drops those lines. What the truncated lines told about
the past (the story, worlds, checkpoints) is kept in the SQLite views, which are therefore synced before the truncation.

Torn last line. A crash of the machine may leave an incomplete or unreadable last line. It was never acted on, so
opening the journal removes it. An unreadable line that is followed by others, or a gap in `seq`, is damage:
JournalDamaged. On request, `store.journal_repair` replaces what is unreadable by events that say so.

Memory. Entries are read one by one, never all at once.

One writer. The file `lock` is locked with flock for as long as the journal is open; a second coordinator on the same
directory gets JournalLocked.

Versions. The file `format` has the protocol number and the version of Shoal that wrote the directory. Events are not
translated between protocols. A directory with another number, or with events but without that file (older versions
wrote none), is refused with DirectoryVersionMismatch, by readers too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import math
import os
import shlex
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

import shoal
from shoal.errors import DirectoryVersionMismatch, EventUnstorable, JournalDamaged, JournalLocked, JournalUnwritable
from shoal.wire.protocol import PROTOCOL

FILE = "journal.jsonl"
SNAPSHOT_FILE = "journal.snapshot"
LOCK_FILE = "lock"
FORMAT_FILE = "format"
PART = ".part"
SYNC_EVERY_S = 1.0
INTEGERS = range(-(1 << 63), 1 << 63)


class JournalEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line: an event of `run` ("" for the coordinator itself) at `at`, in epoch seconds."""

    seq: int
    at: float
    run: str
    kind: str
    fields: dict[str, Any]


class SnapshotHeader(msgspec.Struct, frozen=True):
    """First line of the snapshot file: after which event the state was taken, and the checksum of the rest."""

    seq: int
    at: float
    sha256: str


@dataclass(frozen=True, slots=True)
class JournalSnapshot:
    """The state after event `seq`, encoded; `at` is the latest time of any event up to it."""

    seq: int
    at: float
    body: bytes


@dataclass(frozen=True, slots=True)
class Position:
    """The end of the journal at one time: its last event, the size of the file, and the latest time of any event."""

    seq: int
    end: int
    at: float


class DirectoryFormat(msgspec.Struct, frozen=True):
    """The protocol number and the version of Shoal that wrote a directory."""

    protocol: int
    shoal: str


_decoder = msgspec.json.Decoder(JournalEntry)
_encoder = msgspec.json.Encoder()
# Bytes that are not UTF-8 raise the second.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)


def encode_event(seq: int, at: float, run: str, event: object) -> JournalEntry:
    """Return the entry that records an event."""
    return JournalEntry(seq, at, run, type(event).__name__, msgspec.to_builtins(event))


def _encode_line(seq: int, at: float, run: str, event: object) -> tuple[JournalEntry, bytes]:
    """Return the entry and the line of an event; raise EventUnstorable if it could not be read again."""
    kind = type(event)
    try:
        entry = encode_event(seq, at, run, event)
        if (problem := _unstorable_value(entry.fields, "")) or not math.isfinite(at):
            raise ValueError(problem or f"its time is {at}")
        line = _encoder.encode(entry) + b"\n"
        decode_event(_decoder.decode(line), {kind.__name__: kind})
    except (msgspec.MsgspecError, ValueError, OverflowError, TypeError, JournalDamaged) as error:
        why = error.why if isinstance(error, JournalDamaged) else str(error)
        raise EventUnstorable(f"refused an event that the journal cannot hold: {kind.__name__}", why=why) from error
    return entry, line


def _unstorable_value(value: object, name: str) -> str:
    """Return what is wrong with the first number that cannot be stored, "" if all can."""
    if isinstance(value, dict):
        inner = ((item, f"{name}.{key}" if name else str(key)) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        inner = ((item, name) for item in value)
    else:
        is_bad = value not in INTEGERS if type(value) is int else type(value) is float and not math.isfinite(value)
        return f"{name} is {str(value)[:40]}" if is_bad else ""
    return next((problem for item, label in inner if (problem := _unstorable_value(item, label))), "")


def decode_event(entry: JournalEntry, kinds: Mapping[str, type], directory: Path | None = None) -> Any:
    """Return the event of an entry; raise JournalDamaged if its kind is unknown or its fields do not match."""
    kind = kinds.get(entry.kind)
    where = f"event {entry.seq}" + (f" in {directory / FILE}" if directory is not None else "")
    do = _skip_command(directory) if directory is not None else ""
    if kind is None:
        raise JournalDamaged(f"unknown event {entry.kind} in the journal", where=where, do=do)
    try:
        return msgspec.convert(entry.fields, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise JournalDamaged("cannot decode an event of the journal", where=where, why=str(error), do=do) from error


def read(directory: Path) -> Iterator[JournalEntry]:
    """Yield the entries after the snapshot, without a torn last line.

    Raise JournalDamaged if another line is unreadable, and DirectoryVersionMismatch.
    """
    check_format(directory)
    snapshot = read_snapshot(directory)
    start = snapshot.seq if snapshot is not None else 0
    for entry, _ in _scan(directory / FILE, start):
        if entry.seq > start:
            yield entry


def read_snapshot(directory: Path) -> JournalSnapshot | None:
    """Return the newest snapshot, None if there is none; raise JournalDamaged if it is not what was written."""
    path = directory / SNAPSHOT_FILE
    try:
        head, _, body = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        header = msgspec.json.decode(head, type=SnapshotHeader)
    except UNREADABLE as error:
        raise _damaged_snapshot(path, f"its first line is unreadable: {error}") from error
    if hashlib.sha256(body).hexdigest() != header.sha256:
        raise _damaged_snapshot(path, "its checksum is wrong")
    return JournalSnapshot(header.seq, header.at, body)


def _scan(path: Path, start: int) -> Iterator[tuple[JournalEntry, int]]:
    """Yield the entries, each with the offset at which its line ends; the first is at most the one after `start`."""
    offset = 0
    expected: int | None = None
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                entry = _decoder.decode(line)
            except UNREADABLE as error:
                if file.read(1) == b"":
                    return
                _damaged(path, number, str(error))
            if expected is None:
                expected = min(max(entry.seq, 1), start + 1)
            if entry.seq != expected:
                _damaged(path, number, f"expected event {expected}, found event {entry.seq}")
            expected += 1
            yield entry, offset


def _damaged(path: Path, number: int, why: str) -> NoReturn:
    raise JournalDamaged(
        f"line {number} of the journal is damaged", where=str(path), why=why, do=_skip_command(path.parent)
    )


def _damaged_snapshot(path: Path, why: str) -> JournalDamaged:
    return JournalDamaged(
        "the snapshot of the journal is damaged", where=str(path), why=why, do=_skip_command(path.parent)
    )


def _skip_command(directory: Path) -> str:
    command = f"shoal doctor --repair {shlex.quote(str(directory))}"
    return f"restore the file from a backup, or go on without what is unreadable: {command}"


class Journal:
    """The journal of one directory, open for appending and locked against a second coordinator.

    `snapshot` is the state from which to replay the `entries`, `seq` is the number of the last event, and `last_at` the
    latest time of any.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self._lock = lock(directory)
        try:
            check_format(directory, create=True)
            self.snapshot = read_snapshot(directory)
            self._open()
        except BaseException:
            os.close(self._lock)
            raise
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._syncer = threading.Thread(target=self._sync, name="journal-sync", daemon=True)
        self._syncer.start()

    def _open(self) -> None:
        """Find the last event; truncate a torn last line, or lines that the snapshot contains; go to the end."""
        self._start = self.seq = self.snapshot.seq if self.snapshot is not None else 0
        self.last_at = self.snapshot.at if self.snapshot is not None else 0.0
        self._end = 0
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            for entry, end in _scan(self.path, self._start):
                if entry.seq > self._start:
                    self.seq, self._end, self.last_at = entry.seq, end, max(entry.at, self.last_at)
            os.ftruncate(self._file, self._end)
            os.lseek(self._file, self._end, os.SEEK_SET)
        except OSError as error:
            os.close(self._file)
            raise _unwritable(self.path, error) from error
        except JournalDamaged:
            os.close(self._file)
            raise

    def entries(self) -> Iterator[JournalEntry]:
        """Yield the entries after the snapshot, to be replayed before anything is appended."""
        for entry, _ in _scan(self.path, self._start):
            if entry.seq > self._start:
                yield entry

    @property
    def events(self) -> int:
        """How many events a restart would replay."""
        return self.seq - self._start

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._end

    def append(self, run: str, event: object, at: float) -> JournalEntry:
        """Write an event; once this returns, a crash of this process cannot lose it.

        Raise EventUnstorable if it could not be read again, and JournalUnwritable.
        """
        entry, line = _encode_line(self.seq + 1, at, run, event)
        try:
            written = os.write(self._file, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, "only part of the line was written")
        except OSError as error:
            self._undo_write()
            raise _unwritable(self.path, error) from error
        self._end += len(line)
        self.seq += 1
        self.last_at = max(self.last_at, at)
        self._dirty.set()
        return entry

    def _undo_write(self) -> None:
        """Remove what a failed write left behind, so that the next line starts at a line boundary."""
        os.lseek(self._file, self._end, os.SEEK_SET)
        # If the disk does not even allow this, the rest is a torn last line until the next write replaces it.
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, self._end)

    # --- truncation

    def position(self) -> Position:
        """Return the present end, for a snapshot of the state that the events up to here have led to."""
        return Position(self.seq, self._end, self.last_at)

    def write_snapshot(self, position: Position, body: bytes) -> None:
        """Store the state at a position, durably; any thread may do it. Raise JournalUnwritable."""
        write_snapshot(self.path.parent, JournalSnapshot(position.seq, position.at, body))

    def drop_before(self, position: Position) -> None:
        """Drop the lines that the stored snapshot at this position contains. Raise JournalUnwritable."""
        part = self.path.with_name(FILE + PART)
        try:
            rest = os.pread(self._file, self._end - position.end, position.end)
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                write_all(descriptor, rest)
                if rest:
                    # They may be on the disk already, in the file that is replaced.
                    os.fsync(descriptor)
                os.replace(part, self.path)
                # The syncing thread uses the same number, now for the new file.
                os.dup2(descriptor, self._file, inheritable=False)
            finally:
                os.close(descriptor)
        except OSError as error:
            _remove(part)
            raise _unwritable(part, error) from error
        self._start, self._end = position.seq, len(rest)
        self._dirty.set()

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


def lock(directory: Path) -> int:
    """Return a descriptor that keeps other coordinators out of a directory until closed; raise JournalLocked."""
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


def check_format(directory: Path, *, create: bool = False) -> None:
    """Raise DirectoryVersionMismatch if another version wrote this directory; with `create`, mark a new one."""
    path, journal = directory / FORMAT_FILE, directory / FILE
    try:
        written = msgspec.json.decode(path.read_bytes(), type=DirectoryFormat)
    except FileNotFoundError:
        if (journal.exists() and journal.stat().st_size) or (directory / SNAPSHOT_FILE).exists():
            raise _mismatch(directory, "an older version of Shoal") from None
        if create:
            replace_file(path, msgspec.json.encode(DirectoryFormat(PROTOCOL, shoal.__version__)))
        return
    except UNREADABLE as error:
        raise _mismatch(directory, f"an unknown version of Shoal ({error})") from error
    except OSError as error:
        raise _unwritable(path, error) from error
    if written.protocol != PROTOCOL:
        raise _mismatch(directory, f"Shoal {written.shoal} (protocol {written.protocol})")


def write_snapshot(directory: Path, snapshot: JournalSnapshot) -> None:
    """Replace the snapshot of a directory, durably; raise JournalUnwritable."""
    header = SnapshotHeader(snapshot.seq, snapshot.at, hashlib.sha256(snapshot.body).hexdigest())
    replace_file(directory / SNAPSHOT_FILE, _encoder.encode(header) + b"\n" + snapshot.body)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file such that a crash leaves the old one or the new one; raise JournalUnwritable."""
    part = path.with_name(path.name + PART)
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(part, path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        _remove(part)
        raise _unwritable(path, error) from error


def _remove(part: Path) -> None:
    """Remove an unfinished file, which would take the space that the journal needs, if the disk allows it."""
    with contextlib.suppress(OSError):
        part.unlink(missing_ok=True)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`; raise OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


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
