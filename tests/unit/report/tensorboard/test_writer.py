"""Writing of event files, and errors of the disk."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from tests.unit.report.tensorboard.event_reader import read, read_folder, series
from tests.unit.report.tensorboard.test_rows import line, view

from shoal.report.tensorboard import writer
from shoal.report.tensorboard.rows import EventRow
from shoal.report.tensorboard.writer import EventFile, EventFiles


def rows(*steps: int) -> list[EventRow]:
    return [EventRow(float(step), step, scalars={"a": float(step)}) for step in steps]


class FullDisk:
    """File that accepts `room` bytes and then fails; the last write is partial."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return int(written)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_file_starts_with_its_version_and_grows_by_rows(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "t")
    file.append(rows(1, 2))
    assert [event.version for event in read_folder(tmp_path / "t")] == ["brain.Event:2", "", ""]
    file.close()
    file.append(rows(3))
    (path,) = (tmp_path / "t").iterdir()
    assert path.name.startswith("events.out.tfevents.")
    assert series(read(path.read_bytes()), "a") == {1: 1.0, 2: 2.0, 3: 3.0}


def test_two_writers_create_two_files(tmp_path: Path) -> None:
    for step in (1, 2):
        EventFile(tmp_path).append(rows(step))
    assert len(list(tmp_path.iterdir())) == 2
    assert series(read_folder(tmp_path), "a") == {1: 1.0, 2: 2.0}


def test_torn_record_is_removed_and_written_again_later(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.append(rows(1))
    disk = file._file
    file._file = FullDisk(disk, 10)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space"):
        file.append(rows(2))
    assert series(read_folder(tmp_path), "a") == {1: 1.0}
    file._file = disk
    file.append(rows(2))
    assert series(read_folder(tmp_path), "a") == {1: 1.0, 2: 2.0}


def test_deleted_file_is_created_again(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.append(rows(1))
    file.close()
    next(tmp_path.iterdir()).unlink()
    file.append(rows(2))
    assert [event.version for event in read_folder(tmp_path)] == ["brain.Event:2", ""]


def test_disk_error_is_reported_once_and_rows_are_written_later(tmp_path: Path) -> None:
    (tmp_path / writer.FOLDER).write_text("in the way")
    warnings: list[str] = []
    reports = EventFiles(warnings.append)
    for second in range(5):
        reports.record_view(view(step=second + 1, directory=str(tmp_path)), 0.1, now=float(second))
        reports.write()
    assert len(warnings) == 1
    assert "cannot be written: File exists" in warnings[0]
    assert reports.error_of("r") == "File exists"
    (tmp_path / writer.FOLDER).unlink()
    reports.write()
    assert reports.error_of("r") == ""
    assert list(series(read_folder(tmp_path / writer.FOLDER), "training/loss")) == [1, 2, 3, 4, 5]
    reports.close()


def test_oldest_unwritten_rows_are_dropped(tmp_path: Path) -> None:
    (tmp_path / writer.FOLDER).write_text("in the way")
    reports = EventFiles(lambda _: None)
    for second in range(writer.MAX_PENDING_ROWS + 5):
        reports.record_view(view(step=second + 1, directory=str(tmp_path)), 0.1, now=float(second))
        reports.write()
    assert len(reports._reports["r"].unwritten) == writer.MAX_PENDING_ROWS


def test_file_of_an_ended_run_is_closed_and_continued_after_resume(tmp_path: Path) -> None:
    reports = EventFiles(lambda _: None)
    assert not reports.pending
    reports.record_view(view(step=1, directory=str(tmp_path)), 0.1, now=1.0)
    assert reports.pending
    reports.record_view(view(step=2, directory=str(tmp_path), ended=2.0), 0.1, now=2.0)
    reports.write()
    assert not reports.pending
    assert reports._reports["r"].file._file is None
    reports.record_line(str(tmp_path), line("run resumed"), 2)
    reports.record_view(view(step=3, directory=str(tmp_path)), 0.1, now=3.0)
    reports.write()
    events = read_folder(tmp_path / writer.FOLDER)
    assert list(series(events, "training/loss")) == [1, 2, 3]
    assert [event.texts for event in events if event.texts] == [{"story": "run resumed"}]
    assert len(list((tmp_path / writer.FOLDER).iterdir())) == 1


def test_run_that_ended_before_a_restart_gets_no_file(tmp_path: Path) -> None:
    reports = EventFiles(lambda _: None)
    reports.record_view(view(directory=str(tmp_path), ended=2.0), 0.1, now=3.0)
    reports.close()
    assert not (tmp_path / writer.FOLDER).exists()
