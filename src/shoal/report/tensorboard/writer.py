"""The event files of runs: what is shown and told waits here until it is written, in another thread."""

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
MAX_WAITING = 1000
MAX_NAMES = 100


def folder_of(run_dir: str) -> str:
    """Where the event files of a run are."""
    return f"{run_dir}/{FOLDER}"


class EventFile:
    """One event file, made when there is something to write; it is only appended to, whole records at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._file: IO[bytes] | None = None
        self._size = 0

    def append(self, rows: list[EventRow]) -> None:
        """Write all rows, or none of them if an OSError is raised."""
        file = self._file = self._file or self._open()
        data = b"".join(map(encode, rows))
        if not self._size:
            data = tfevents.record(tfevents.opening(rows[0].at)) + data
        try:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
        except OSError:
            self._cut(file)
            raise
        self._size += len(data)

    def _open(self) -> IO[bytes]:
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

    def _cut(self, file: IO[bytes]) -> None:
        """Take back a torn record: what follows one could not be read."""
        try:
            file.truncate(self._size)
            file.seek(self._size)
        except OSError:
            # Nothing more can be appended to this one.
            self.close()
            self._path = None

    def close(self) -> None:
        """Let go of the file; if there is more to write after all, it is opened again."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


class _Report:
    """One run: what is to be written, and where."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder = folder
        self.rows = RunRows(step)
        self.file = EventFile(folder)
        self.waiting: deque[EventRow] = deque(maxlen=MAX_WAITING)
        self.trouble = ""
        self.warned = False
        self.over = False


class EventFiles:
    """The event files of all runs of a coordinator.

    `show` and `tell` only take notes; `write` does the writing and may be called in any thread. An error of the disk
    reaches nobody: it is told to `warn` once a run, and what could not be written is tried again at the next call.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._reports: dict[str, _Report] = {}
        self._notes = threading.Lock()
        self._writing = threading.Lock()

    def record_view(self, view: RunView, step_s: float, now: float) -> None:
        """Note how a run goes."""
        over = view.ended is not None
        with self._notes:
            if over and view.run not in self._reports:
                return
            report = self._report(view.run, view.directory, view.step)
            report.rows.add_view(view, step_s, now)
            report.over = over

    def record_line(self, run_dir: str, line: StoryLine, step: int) -> None:
        """Note a line of a run's story; `step` is where the run is, if the line does not say it."""
        with self._notes:
            self._report(line.run, run_dir, step).rows.add_line(line, step)

    def error_of(self, run: str) -> str:
        """Why the files of a run are not written now, if so."""
        report = self._reports.get(run)
        return report.trouble if report is not None else ""

    @property
    def pending(self) -> bool:
        """Whether there is anything to write."""
        return any(report.rows.pending or report.waiting for report in self._reports.values())

    def write(self) -> None:
        """Write all that was noted."""
        with self._writing:
            with self._notes:
                reports = list(self._reports.items())
                for _, report in reports:
                    report.waiting.extend(report.rows.take())
            for run, report in reports:
                if report.waiting:
                    self._write(run, report)
                if report.over:
                    report.file.close()

    def close(self) -> None:
        """Write the rest, and let go of the files."""
        self.write()
        for report in self._reports.values():
            report.file.close()

    def _report(self, run: str, run_dir: str, step: int) -> _Report:
        if run not in self._reports:
            self._reports[run] = _Report(Path(folder_of(run_dir)), step)
        return self._reports[run]

    def _write(self, run: str, report: _Report) -> None:
        try:
            report.file.append(list(report.waiting))
        except OSError as error:
            report.trouble = error.strerror or str(error)
            if not report.warned:
                report.warned = True
                self._warn(f"the TensorBoard files of {run} in {report.folder} cannot be written: {report.trouble}")
            return
        report.waiting.clear()
        report.trouble = ""


def encode(row: EventRow) -> bytes:
    """The records of a row."""
    found = b""
    if row.scalars:
        found += tfevents.record(tfevents.scalars(row.at, row.step, row.scalars))
    if row.texts:
        found += tfevents.record(tfevents.texts(row.at, row.step, row.texts))
    return found
