"""The journal keeps what it was given, and says so when it cannot."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from shoal.core.membership import events as ev
from shoal.core.world import Address
from shoal.errors import (
    DirectoryVersionMismatch,
    EventUnstorable,
    JournalDamaged,
    JournalLocked,
    JournalUnwritable,
)
from shoal.store import journal
from shoal.store.journal import Journal
from shoal.wire.protocol import PROTOCOL

EVENTS: list[ev.Event] = [
    ev.MemberConnected("a/0", "1", Address("h", 7)),
    ev.WorldBroken("a/0", 3, 17, ("b/0", "c/0"), "reset"),
    ev.CoordinatorRestarted(),
    ev.StopRequested("enough", True, 75),
]
KINDS = {kind.__name__: kind for kind in ev.Event.__args__}  # type: ignore[attr-defined]


def write(directory: Path, events: list[ev.Event]) -> Path:
    opened = Journal(directory)
    for event in events:
        opened.append("run", event, 5.0)
    opened.close()
    return directory / journal.FILE


def test_events_come_back_as_they_were(tmp_path: Path) -> None:
    path = write(tmp_path, EVENTS)
    entries = list(journal.read(path.parent))
    assert [journal.decode_event(entry, KINDS) for entry in entries] == EVENTS
    assert [(entry.seq, entry.at, entry.run) for entry in entries] == [(n, 5.0, "run") for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("kept", range(0, 60, 7))
def test_a_torn_last_line_is_cut_off_and_written_over(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path, EVENTS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:kept])
    again = Journal(tmp_path)
    assert [entry.seq for entry in again.entries()] == [1, 2, 3]
    again.append("run", EVENTS[3], 6.0)
    again.close()
    assert [entry.seq for entry in journal.read(path.parent)] == [1, 2, 3, 4]


def test_a_last_line_of_zeros_is_torn_too(tmp_path: Path) -> None:
    path = write(tmp_path, EVENTS)
    with open(path, "ab") as file:
        file.write(b"\0" * 40 + b"\n")
    again = Journal(tmp_path)
    assert len(list(again.entries())) == 4
    again.close()


@pytest.mark.parametrize(
    "damage", [b"{}\n", b"nonsense\n", b"\n", b'{"seq":9,"at":1,"run":"","kind":"x","fields":{}}\n']
)
def test_damage_in_the_middle_names_its_line(tmp_path: Path, damage: bytes) -> None:
    path = write(tmp_path, EVENTS)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = damage
    path.write_bytes(b"".join(lines))
    with pytest.raises(JournalDamaged, match="line 2"):
        Journal(tmp_path)
    assert path.read_bytes() == b"".join(lines)


def test_a_lost_line_in_the_middle_is_damage(tmp_path: Path) -> None:
    path = write(tmp_path, EVENTS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(JournalDamaged, match="line 2"):
        Journal(tmp_path)


def test_an_event_of_a_newer_version_is_not_guessed_at(tmp_path: Path) -> None:
    entry = journal.JournalEntry(1, 0.0, "r", "Unheard", {})
    with pytest.raises(JournalDamaged, match="Unheard"):
        journal.decode_event(entry, KINDS)
    with pytest.raises(JournalDamaged):
        journal.decode_event(journal.JournalEntry(1, 0.0, "r", "MemberLost", {"member": 3}), KINDS)


def test_a_directory_has_one_journal_open(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    with pytest.raises(JournalLocked):
        Journal(tmp_path)
    first.close()
    Journal(tmp_path).close()


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(JournalUnwritable):
        Journal(tmp_path / "nowhere")


def test_a_full_disk_takes_back_half_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Journal(tmp_path)
    opened.append("run", EVENTS[0], 1.0)
    real = os.write

    def half(descriptor: int, data: bytes) -> int:
        return real(descriptor, data[: len(data) // 2])

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for broken in (half, full):
        monkeypatch.setattr(os, "write", broken)
        with pytest.raises(JournalUnwritable):
            opened.append("run", EVENTS[1], 2.0)
    monkeypatch.setattr(os, "write", real)
    opened.append("run", EVENTS[2], 3.0)
    opened.close()
    assert [entry.kind for entry in journal.read(tmp_path)] == [
        "MemberConnected",
        "CoordinatorRestarted",
    ]


def test_what_cannot_even_be_taken_back_is_written_over_later(tmp_path: Path) -> None:
    """As on a disk that the kernel has made read-only: neither a write nor a cut is allowed."""
    opened = Journal(tmp_path)
    opened.append("run", EVENTS[0], 5.0)
    sealed = os.memfd_create("journal", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    disk = os.dup(opened._file)
    os.dup2(sealed, opened._file)
    with pytest.raises(JournalUnwritable):
        opened.append("run", EVENTS[1], 6.0)
    os.dup2(disk, opened._file)
    opened.append("run", EVENTS[2], 7.0)
    opened.close()
    os.close(disk)
    os.close(sealed)
    assert [entry.at for entry in journal.read(tmp_path)] == [5.0, 7.0]


def test_the_rest_of_a_torn_line_that_stayed_is_no_part_of_the_next(tmp_path: Path) -> None:
    opened = Journal(tmp_path)
    opened.append("run", EVENTS[0], 5.0)
    with open(tmp_path / journal.FILE, "ab") as torn:
        torn.write(b"x" * 5000)
    opened.append("run", EVENTS[2], 6.0)
    opened.append("run", EVENTS[1], 7.0)
    opened.close()
    again = Journal(tmp_path)
    assert [entry.at for entry in again.entries()] == [5.0, 6.0, 7.0]
    again.close()


def test_directory_of_an_older_version_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, EVENTS)
    (tmp_path / journal.FORMAT_FILE).unlink()
    before = path.read_bytes()
    with pytest.raises(DirectoryVersionMismatch, match="written by an older version") as refused:
        Journal(tmp_path)
    assert "new directory" in refused.value.do
    assert path.read_bytes() == before


def test_directory_of_another_protocol_is_refused_with_the_version_that_wrote_it(tmp_path: Path) -> None:
    write(tmp_path, EVENTS)
    (tmp_path / journal.FORMAT_FILE).write_text(f'{{"protocol": {PROTOCOL + 1}, "shoal": "9.8.7"}}')
    with pytest.raises(DirectoryVersionMismatch, match=rf"Shoal 9.8.7 \(protocol {PROTOCOL + 1}\)"):
        Journal(tmp_path)


def test_unreadable_format_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, EVENTS)
    (tmp_path / journal.FORMAT_FILE).write_text("nonsense")
    with pytest.raises(DirectoryVersionMismatch, match="unknown version"):
        Journal(tmp_path)


def test_refused_directory_is_not_left_locked(tmp_path: Path) -> None:
    write(tmp_path, EVENTS)
    kept = (tmp_path / journal.FORMAT_FILE).read_bytes()
    (tmp_path / journal.FORMAT_FILE).write_text("nonsense")
    with pytest.raises(DirectoryVersionMismatch):
        Journal(tmp_path)
    (tmp_path / journal.FORMAT_FILE).write_bytes(kept)
    opened = Journal(tmp_path)
    assert len(list(opened.entries())) == len(EVENTS)
    opened.close()


@pytest.mark.parametrize(
    ("event", "named"),
    [
        (ev.NoticeReceived("a/0", float("inf"), "spot"), "within_s is inf"),
        (ev.MemberReady("a/0", "x", None, speed=float("nan")), "speed is nan"),
        (ev.ProgressRecorded(1 << 63), f"step is {1 << 63}"),
        (ev.AdjustmentReported("a/0", 1, "shares", {"a/0": 10**30}, ""), "values.a/0 is"),
        (ev.ProgressRecorded("7"), "int"),  # type: ignore[arg-type]
        (ev.MemberLost("a/0", "\ud800"), "surrogates"),
    ],
)
def test_event_that_could_not_be_read_again_is_refused_before_it_is_written(
    tmp_path: Path, event: ev.Event, named: str
) -> None:
    opened = Journal(tmp_path)
    opened.append("run", EVENTS[0], 5.0)
    before = opened.path.read_bytes()
    with pytest.raises(EventUnstorable) as refused:
        opened.append("run", event, 6.0)
    assert named in refused.value.why
    assert (opened.path.read_bytes(), opened.seq) == (before, 1)
    opened.append("run", EVENTS[1], 7.0)
    opened.close()
    assert [journal.decode_event(entry, KINDS) for entry in journal.read(tmp_path)] == EVENTS[:2]


def test_largest_integers_are_kept(tmp_path: Path) -> None:
    events: list[ev.Event] = [ev.ProgressRecorded((1 << 63) - 1), ev.ProgressRecorded(-(1 << 63))]
    write(tmp_path, events)
    assert [journal.decode_event(entry, KINDS) for entry in journal.read(tmp_path)] == events


def test_bytes_that_are_no_unicode_are_damage_that_names_the_remedy(tmp_path: Path) -> None:
    path = write(tmp_path, EVENTS)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"reset", b"re\xffet")
    path.write_bytes(b"".join(lines))
    with pytest.raises(JournalDamaged, match="line 2") as damaged:
        Journal(tmp_path)
    assert f"shoal doctor --repair {tmp_path}" in damaged.value.do


def test_reader_refuses_a_directory_of_another_protocol(tmp_path: Path) -> None:
    write(tmp_path, EVENTS)
    (tmp_path / journal.FORMAT_FILE).write_text(f'{{"protocol": {PROTOCOL + 1}, "shoal": "9.8.7"}}')
    with pytest.raises(DirectoryVersionMismatch):
        list(journal.read(tmp_path))


# --- snapshot and truncation


def truncate(opened: Journal, body: bytes = b"state") -> None:
    position = opened.position()
    opened.write_snapshot(position, body)
    opened.drop_before(position)


def test_truncated_journal_holds_the_snapshot_and_what_came_after(tmp_path: Path) -> None:
    opened = Journal(tmp_path)
    for at, event in enumerate(EVENTS):
        opened.append("run", event, float(at))
    position = opened.position()
    opened.append("run", EVENTS[0], 7.0)
    opened.write_snapshot(position, b"after four")
    opened.append("run", EVENTS[1], 8.0)
    opened.drop_before(position)
    opened.append("run", EVENTS[2], 9.0)
    assert (opened.seq, opened.events) == (7, 3)
    opened.close()
    again = Journal(tmp_path)
    assert again.snapshot == journal.JournalSnapshot(4, 3.0, b"after four")
    assert [(entry.seq, entry.at) for entry in again.entries()] == [(5, 7.0), (6, 8.0), (7, 9.0)]
    assert (again.seq, again.last_at) == (7, 9.0)
    again.close()
    assert [entry.seq for entry in journal.read(tmp_path)] == [5, 6, 7]


def test_journal_stays_small_however_many_events_it_gets(tmp_path: Path) -> None:
    opened = Journal(tmp_path)
    for _ in range(20):
        for event in EVENTS * 5:
            opened.append("run", event, 1.0)
        truncate(opened)
    assert (opened.seq, opened.size) == (400, 0)
    opened.close()
    assert opened.path.stat().st_size == 0


def test_journal_that_a_power_failure_shortened_does_not_hide_the_snapshot(tmp_path: Path) -> None:
    opened = Journal(tmp_path)
    for event in EVENTS:
        opened.append("run", event, 5.0)
    opened.write_snapshot(opened.position(), b"state")
    opened.close()
    lines = opened.path.read_bytes().splitlines(keepends=True)
    opened.path.write_bytes(b"".join(lines[:2]))
    again = Journal(tmp_path)
    assert (again.seq, list(again.entries())) == (4, [])
    again.append("run", EVENTS[0], 6.0)
    again.close()
    assert [entry.seq for entry in journal.read(tmp_path)] == [5]


@pytest.mark.parametrize("damage", [b"", b"nonsense", b'{"seq":1,"at":1,"sha256":"0"}\nstate'])
def test_damaged_snapshot_is_refused(tmp_path: Path, damage: bytes) -> None:
    opened = Journal(tmp_path)
    opened.append("run", EVENTS[0], 5.0)
    truncate(opened)
    opened.close()
    (tmp_path / journal.SNAPSHOT_FILE).write_bytes(damage)
    with pytest.raises(JournalDamaged, match="snapshot"):
        Journal(tmp_path)


def test_missing_events_after_the_snapshot_are_damage(tmp_path: Path) -> None:
    opened = Journal(tmp_path)
    opened.append("run", EVENTS[0], 5.0)
    truncate(opened)
    opened.append("run", EVENTS[1], 6.0)
    opened.append("run", EVENTS[2], 7.0)
    opened.close()
    opened.path.write_bytes(opened.path.read_bytes().splitlines(keepends=True)[1])
    with pytest.raises(JournalDamaged, match="line 1"):
        Journal(tmp_path)


class Crash(BaseException):
    """The end of the process at this system call."""


CALLS = ("open", "write", "fsync", "replace", "dup2", "pread", "close")


def crash_at(call: int, directory: Path, monkeypatch: pytest.MonkeyPatch, *, half: bool) -> bool:
    """Truncate a journal of six events, crashing at a system call; return whether there was such a call.

    With `half`, a write that crashes has written half of its data, and any other call has done its work.
    """
    opened = Journal(directory)
    for event in EVENTS:
        opened.append("run", event, 5.0)
    truncate(opened, b"4 events")
    opened.append("run", EVENTS[0], 6.0)
    position = opened.position()
    opened.append("run", EVENTS[1], 7.0)
    calls = 0

    def counted(name: str) -> Any:
        real = getattr(os, name)

        def function(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                if half:
                    if name == "write":
                        arguments = (arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                    real(*arguments, **options)
                raise Crash
            return real(*arguments, **options)

        return function

    with monkeypatch.context() as patched:
        for name in CALLS:
            patched.setattr(os, name, counted(name))
        try:
            opened.write_snapshot(position, b"5 events")
            opened.drop_before(position)
            crashed = False
        except Crash:
            crashed = True
    copy = directory.with_name(f"{directory.name}-after")
    shutil.copytree(directory, copy)
    opened._closing.set()
    return crashed


@pytest.mark.parametrize("half", [False, True])
def test_crash_at_any_system_call_of_a_truncation_leaves_a_directory_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: bool
) -> None:
    bodies: list[bytes] = []
    for call in count(1):
        directory = tmp_path / str(call)
        directory.mkdir()
        crashed = crash_at(call, directory, monkeypatch, half=half)
        again = Journal(directory.with_name(f"{call}-after"))
        assert again.snapshot is not None
        events = int(again.snapshot.body.split()[0])
        assert [entry.seq for entry in again.entries()] == list(range(events + 1, 7)), f"crash at call {call}"
        bodies.append(again.snapshot.body)
        assert again.append("run", EVENTS[2], 8.0).seq == 7
        again.close()
        last = Journal(directory.with_name(f"{call}-after"))
        assert last.seq == 7
        last.close()
        if not crashed:
            break
    assert len(bodies) > 8
    assert bodies == sorted(bodies), "the old snapshot before the rename, the new one after it"
    assert set(bodies) == {b"4 events", b"5 events"}


def test_full_disk_keeps_no_unfinished_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Journal(tmp_path)
    opened.append("run", EVENTS[0], 5.0)
    position = opened.position()

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(JournalUnwritable):
            opened.write_snapshot(position, b"state")
    opened.append("run", EVENTS[1], 6.0)
    opened.close()
    assert not list(tmp_path.glob("*.part"))
    assert [entry.seq for entry in journal.read(tmp_path)] == [1, 2]


def test_full_disk_keeps_no_unfinished_rest_of_a_truncation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Journal(tmp_path)
    opened.append("run", EVENTS[0], 5.0)
    position = opened.position()
    opened.append("run", EVENTS[1], 6.0)
    opened.write_snapshot(position, b"state")

    def full(descriptor: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(journal, "write_all", full)
        with pytest.raises(JournalUnwritable):
            opened.drop_before(position)
    opened.append("run", EVENTS[2], 7.0)
    opened.close()
    assert not list(tmp_path.glob("*.part"))
    assert [entry.seq for entry in journal.read(tmp_path)] == [2, 3]


def test_disk_that_became_read_only_is_an_error_of_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Journal(tmp_path)
    opened.append("run", EVENTS[0], 5.0)

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", read_only)
        patched.setattr(Path, "unlink", read_only)
        with pytest.raises(JournalUnwritable, match="Read-only"):
            opened.write_snapshot(opened.position(), b"state")
        with pytest.raises(JournalUnwritable, match="Read-only"):
            opened.drop_before(opened.position())
    opened.close()


def test_no_file_is_renamed_before_its_bytes_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Journal(tmp_path)
    opened.append("run", EVENTS[0], 5.0)
    position = opened.position()
    opened.append("run", EVENTS[1], 6.0)
    synced: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def checked_replace(source: Path, target: Path) -> None:
        assert str(source) in synced, "a power failure could leave an empty file under the new name"
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", noted_fsync)
        patched.setattr(os, "replace", checked_replace)
        opened.write_snapshot(position, b"state")
        opened.drop_before(position)
    opened.close()
    assert [entry.seq for entry in journal.read(tmp_path)] == [2]


@pytest.mark.parametrize("at", [float("nan"), float("inf")])
def test_time_that_is_no_number_is_refused(tmp_path: Path, at: float) -> None:
    opened = Journal(tmp_path)
    with pytest.raises(EventUnstorable, match="its time is"):
        opened.append("run", EVENTS[0], at)
    opened.close()
    assert list(journal.read(tmp_path)) == []


def test_command_for_a_damaged_journal_can_be_pasted(tmp_path: Path) -> None:
    directory = tmp_path / "two words"
    directory.mkdir()
    (write(directory, EVENTS)).write_bytes(b"nonsense\nnonsense\n")
    with pytest.raises(JournalDamaged, match=r"--repair '.*/two words'"):
        Journal(directory)
