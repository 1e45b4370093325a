"""Writer of event files: collects the rows of all runs, and writes them when another thread calls `write`."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from shoal.report.tensorboard import tfevents
from shoal.report.tensorboard.rows import EventRow, RunRows
from shoal.wire.api import RunView, StoryLine

FOLDER = "tensorboard"
MAX_PENDING_ROWS = 1000
MAX_NAMES = 100


def folder_of(run_dir: str) -> str:
    """Return the folder of a run's event files."""
    return f"{run_dir}/{FOLDER}"


class EventFile:
    """One event file, created by the first write; only whole records are appended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._file: IO[bytes] | None = None
        self._size = 0

    def append(self, rows: list[EventRow]) -> None:
        """Write all rows; on OSError none of them is in the file."""
        file = self._file = self._file or self._open()
        data = b"".join(map(encode, rows))
        if not self._size:
            data = tfevents.record(tfevents.opening(rows[0].at)) + data
        try:
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[file.write(remaining) :]
        except OSError:
            self._truncate(file)
            raise
        self._size += len(data)

    def _open(self) -> IO[bytes]:
        """Open our file again if it still exists, otherwise create one."""
        if self._path is not None:
            with suppress(FileNotFoundError):
                file = open(self._path, "r+b", buffering=0)  # noqa: SIM115
                file.seek(self._size)
                return file
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        for attempt in range(MAX_NAMES):
            with suppress(FileExistsError):
                path = self._folder / f"{name}.{attempt}"
                file = open(path, "xb", buffering=0)  # noqa: SIM115
                self._path, self._size = path, 0
                return file
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)

    def _truncate(self, file: IO[bytes]) -> None:
        """Remove a torn record: readers cannot continue behind one."""
        try:
            file.truncate(self._size)
            file.seek(self._size)
        except OSError:
            # The torn record stays, so the next write needs a new file.
            self.close()
            self._path = None

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


class _Report:
    """Rows of one run that are not yet written, and its file."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder
        self.rows = RunRows(step)
        self.file = EventFile(folder)
        self.unwritten: deque[EventRow] = deque(maxlen=MAX_PENDING_ROWS)
        self.error = ""
        self.warned = False
        self.ended = False


class EventFiles:
    """Event files of all runs of a coordinator.

    `record_view` and `record_line` only collect; `write` does the I/O and may be called on any thread. It never raises
    an OSError: `warn` is called once for each run, and the next `write` tries the same rows again.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._reports: dict[str, _Report] = {}
        # Never held during I/O, so collecting does not wait for the disk. `write` takes it while it holds _writing.
        self._collecting = threading.Lock()
        self._writing = threading.Lock()

    def record_view(self, view: RunView, step_s: float, now: float) -> None:
        """Record the scalars of a run; runs that ended before this coordinator started are ignored."""
        ended = view.ended is not None
        with self._collecting:
            if ended and view.run not in self._reports:
                return
            report = self._report(view.run, view.directory, view.step)
            report.rows.add_view(view, step_s, now)
            report.ended = ended

    def record_line(self, run_dir: str, line: StoryLine, step: int) -> None:
        """Record a line of a run's story; `step` is that of the run, for lines without one."""
        with self._collecting:
            self._report(line.run, run_dir, step).rows.add_line(line, step)

    def error_of(self, run: str) -> str:
        """Return why the last write for a run failed, or "" if it did not."""
        report = self._reports.get(run)
        return report.error if report is not None else ""

    @property
    def pending(self) -> bool:
        """True if there are rows to write."""
        return any(report.rows.pending or report.unwritten for report in self._reports.values())

    def write(self) -> None:
        """Write all collected rows, and close the files of runs that have ended."""
        with self._writing:
            with self._collecting:
                reports = list(self._reports.items())
                for _, report in reports:
                    report.unwritten.extend(report.rows.take())
            for run, report in reports:
                if report.unwritten:
                    self._write(run, report)
                if report.ended:
                    report.file.close()

    def close(self) -> None:
        """Write the remaining rows and close all files."""
        self.write()
        for report in self._reports.values():
            report.file.close()

    def _report(self, run: str, run_dir: str, step: int) -> _Report:
        if run not in self._reports:
            self._reports[run] = _Report(Path(folder_of(run_dir)), step)
        return self._reports[run]

    def _write(self, run: str, report: _Report) -> None:
        try:
            report.file.append(list(report.unwritten))
        except OSError as error:
            report.error = error.strerror or str(error)
            if not report.warned:
                report.warned = True
                self._warn(f"the TensorBoard files of {run} in {report.folder} cannot be written: {report.error}")
            return
        report.unwritten.clear()
        report.error = ""


def encode(row: EventRow) -> bytes:
    """Return the records of a row."""
    records = b""
    if row.scalars:
        records += tfevents.record(tfevents.scalars(row.at, row.step, row.scalars))
    if row.texts:
        records += tfevents.record(tfevents.texts(row.at, row.step, row.texts))
    return records
