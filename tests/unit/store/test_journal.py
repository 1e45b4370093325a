"""The journal keeps what it was given, and says so when it cannot."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from shoal.core.membership import events as ev
from shoal.core.world import Address
from shoal.errors import DirectoryVersionMismatch, JournalDamaged, JournalLocked, JournalUnwritable
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
    entries = list(journal.read(path))
    assert [journal.decode_event(entry, KINDS) for entry in entries] == EVENTS
    assert [(entry.seq, entry.at, entry.run) for entry in entries] == [(n, 5.0, "run") for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("kept", range(0, 60, 7))
def test_a_torn_last_line_is_cut_off_and_written_over(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path, EVENTS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:kept])
    again = Journal(tmp_path)
    assert [entry.seq for entry in again.entries] == [1, 2, 3]
    again.append("run", EVENTS[3], 6.0)
    again.close()
    assert [entry.seq for entry in journal.read(path)] == [1, 2, 3, 4]


def test_a_last_line_of_zeros_is_torn_too(tmp_path: Path) -> None:
    path = write(tmp_path, EVENTS)
    with open(path, "ab") as file:
        file.write(b"\0" * 40 + b"\n")
    again = Journal(tmp_path)
    assert len(again.entries) == 4
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
    assert [entry.kind for entry in journal.read(tmp_path / journal.FILE)] == [
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
    assert [entry.at for entry in journal.read(tmp_path / journal.FILE)] == [5.0, 7.0]


def test_the_rest_of_a_torn_line_that_stayed_is_no_part_of_the_next(tmp_path: Path) -> None:
    opened = Journal(tmp_path)
    opened.append("run", EVENTS[0], 5.0)
    with open(tmp_path / journal.FILE, "ab") as torn:
        torn.write(b"x" * 5000)
    opened.append("run", EVENTS[2], 6.0)
    opened.append("run", EVENTS[1], 7.0)
    opened.close()
    again = Journal(tmp_path)
    assert [entry.at for entry in again.entries] == [5.0, 6.0, 7.0]
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
    assert len(opened.entries) == len(EVENTS)
    opened.close()
