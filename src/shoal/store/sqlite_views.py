"""SQLite copy of what the journal says, for queries: runs, agents, worlds, metrics, story.

The state of a coordinator never depends on this file. If it is deleted, damaged or of another layout, the coordinator
makes it again from its snapshot and its journal; the story, worlds and checkpoints of events before the snapshot, and
past measurements, are then gone, because this is their only place.

Rows are collected in memory and written in batches by a background thread, so that handling an event never waits for
SQLite; `seq` is the last journal entry whose rows are in the file. A row that SQLite cannot hold costs that row and not
the batch. Commands read the file directly when the coordinator has ended.

Measurements come every second for as long as a run trains. So a run has at most MAX_METRICS of them: when there are as
many, every second one is deleted, and later ones are stored at the distance of those that remain.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Iterable
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import JournalUnwritable
from shoal.wire.api import AgentView, RunView, StoryLine

log = logging.getLogger("shoal.coordinator")

FILE = "views.sqlite"
LAYOUT = "1"
MAX_ROWS = 100_000
# Measurements of a run: all of the first two hours, then one every two seconds up to four hours, and so on.
MAX_METRICS = 7200
# Measurements come a little before their time, too.
EARLY = 0.75
_HALVE_METRICS = """
DELETE FROM metrics WHERE rowid IN (
  SELECT rowid FROM (SELECT rowid, row_number() OVER (ORDER BY at) AS number FROM metrics WHERE run=?)
  WHERE number % 2 = 0)
"""
# The lower bits of an error's code say of which kind it is; of these kinds are a damaged file and another layout.
PRIMARY_CODE = 0xFF
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
_line_values = attrgetter(*(column.name for column in fields(StoryLine)))
_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS runs (run TEXT PRIMARY KEY, created REAL, view BLOB);
CREATE TABLE IF NOT EXISTS agents (agent TEXT PRIMARY KEY, view BLOB);
CREATE TABLE IF NOT EXISTS members (
  run TEXT, member TEXT, incarnation TEXT, first_at REAL, last_at REAL, end TEXT,
  PRIMARY KEY (run, member, incarnation));
CREATE TABLE IF NOT EXISTS worlds (
  run TEXT, number INTEGER, first_step INTEGER, last_step INTEGER, began_at REAL, members TEXT, reason TEXT,
  PRIMARY KEY (run, number));
CREATE TABLE IF NOT EXISTS checkpoints (run TEXT, step INTEGER, path TEXT, at REAL, PRIMARY KEY (run, step));
CREATE TABLE IF NOT EXISTS metrics (run TEXT, at REAL, step INTEGER, loss REAL, samples_per_s REAL);
CREATE INDEX IF NOT EXISTS metrics_by_run ON metrics (run, at);
CREATE TABLE IF NOT EXISTS story (
  seq INTEGER PRIMARY KEY, at REAL, run TEXT, kind TEXT, member TEXT, world INTEGER, step INTEGER, text TEXT,
  reason TEXT);
CREATE INDEX IF NOT EXISTS story_by_run ON story (run, seq);
"""


class WorldRow(msgspec.Struct, frozen=True):
    """A world; `last_step` is None while it is active, `first_step` while it is being prepared."""

    number: int
    first_step: int | None
    last_step: int | None
    began_at: float
    members: tuple[str, ...]
    reason: str


class MetricRow(msgspec.Struct, frozen=True):
    """Progress of a run at one time."""

    at: float
    step: int
    loss: float | None
    samples_per_s: float


@dataclass(slots=True)
class _MetricPace:
    """How many measurements of a run are stored, from when to when, and the least time to the next one."""

    rows: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    every_s: float = 0.0

    def admits(self, at: float) -> bool:
        """Return whether to store a measurement of this time; count it then."""
        if self.rows and 0.0 <= at - self.last_at < self.every_s:
            return False
        self.first_at = self.first_at if self.rows else at
        self.last_at = at
        self.rows += 1
        return True

    def halve(self) -> None:
        self.rows = (self.rows + 1) // 2
        self.every_s = EARLY * max(0.0, self.last_at - self.first_at) / self.rows


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Statements to execute, and the journal entry up to which they are complete."""

    rows: list[tuple[str, tuple[Any, ...]]]
    seq: int | None


class SqliteViews:
    """The views of one coordinator, open for writing."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self._lock = threading.Lock()
        self._rows: list[tuple[str, tuple[Any, ...]]] = []
        self._seq: int | None = None
        self._stored_seq: int | None = None
        self._metric_paces: dict[str, _MetricPace] = {}
        self._connection = self._open()

    def _open(self) -> sqlite3.Connection:
        try:
            return self._prepare_or_replace()
        except (sqlite3.Error, OSError) as error:
            raise JournalUnwritable(
                "the coordinator cannot write its views",
                where=str(self.path),
                why=str(error),
                do="free disk space or fix the permissions",
            ) from error

    def _prepare_or_replace(self) -> sqlite3.Connection:
        try:
            return self._prepare()
        except sqlite3.DatabaseError as error:
            # Locked or on a full disk, it is still the only place of the story before a snapshot.
            if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & PRIMARY_CODE not in DAMAGE:
                raise
            for name in (FILE, f"{FILE}-wal", f"{FILE}-shm"):
                (self.path.parent / name).unlink(missing_ok=True)
            return self._prepare()

    def _prepare(self) -> sqlite3.Connection:
        # SQLite gives its side files (-wal, -shm) the same mode.
        self.path.touch(0o600)
        connection = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
        connection.execute("PRAGMA journal_mode=WAL")
        # Safe against damage by a power failure in this mode; only checkpoints of the file wait for the disk.
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.executescript(_TABLES)
        layout = connection.execute("SELECT value FROM meta WHERE key='layout'").fetchone()
        if layout is not None and layout[0] != LAYOUT:
            raise sqlite3.DatabaseError("another layout")
        connection.execute("INSERT OR REPLACE INTO meta VALUES ('layout', ?)", (LAYOUT,))
        return connection

    @property
    def seq(self) -> int:
        """The last journal entry whose rows are in the file."""
        row = self._connection.execute("SELECT value FROM meta WHERE key='seq'").fetchone()
        return int(row[0]) if row else 0

    def clear(self) -> int:
        """Empty all tables, which belong to another journal; return the new `seq`, 0."""
        for table in ("runs", "agents", "members", "worlds", "checkpoints", "metrics", "story"):
            self._connection.execute(f"DELETE FROM {table}")
        self._connection.execute("DELETE FROM meta WHERE key='seq'")
        return 0

    def cut_back(self, seq: int, line: int) -> int:
        """Forget events after `seq`, which the journal lacks, and story lines from `line` on; return `seq`."""
        self._connection.execute("DELETE FROM story WHERE seq>=?", (line,))
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('seq', ?)", (str(seq),))
        return seq

    # --- writing

    def mark_seq(self, seq: int) -> None:
        """Note that all rows of this journal entry have been put."""
        self._seq = seq

    def put_lines(self, lines: Iterable[StoryLine]) -> None:
        for line in lines:
            self._put("INSERT OR REPLACE INTO story VALUES (?,?,?,?,?,?,?,?,?)", *_line_values(line))

    def put_world(self, run: str, row: WorldRow) -> None:
        self._put(
            "INSERT OR REPLACE INTO worlds VALUES (?,?,?,?,?,?,?)",
            *(run, row.number, row.first_step, row.last_step, row.began_at, "\n".join(row.members), row.reason),
        )

    def begin_world(self, run: str, number: int, step: int) -> None:
        """Record that the members of a prepared world entered it, which ends the one before."""
        ended = (
            "UPDATE worlds SET last_step=? WHERE run=? AND number<? AND last_step IS NULL AND first_step IS NOT NULL"
        )
        self._put(ended, step, run, number)
        self._put("UPDATE worlds SET first_step=? WHERE run=? AND number=? AND first_step IS NULL", step, run, number)

    def end_world(self, run: str, number: int, last_step: int) -> None:
        self._put(
            "UPDATE worlds SET last_step=? WHERE run=? AND number<=? AND last_step IS NULL", last_step, run, number
        )

    def put_checkpoint(self, run: str, step: int, path: str, at: float) -> None:
        self._put("INSERT OR REPLACE INTO checkpoints VALUES (?,?,?,?)", run, step, path, at)

    def put_metric(self, run: str, row: MetricRow) -> None:
        """Store a measurement, unless the last one of a long run is too recent; thin all out when they are many."""
        pace = self._metric_paces.get(run)
        if pace is None:
            pace = self._metric_paces[run] = self._read_pace(run)
        if not pace.admits(row.at):
            return
        self._put("INSERT INTO metrics VALUES (?,?,?,?,?)", run, row.at, row.step, row.loss, row.samples_per_s)

        if pace.rows >= MAX_METRICS:
            self._put(_HALVE_METRICS, run)
            pace.halve()

    def _read_pace(self, run: str) -> _MetricPace:
        """Return the pace of a run that an earlier process may have stored measurements of."""
        with self._lock:
            query = "SELECT count(*), min(at), max(at) FROM metrics WHERE run=?"
            rows, first_at, last_at = self._connection.execute(query, (run,)).fetchone()
        pace = _MetricPace(rows, first_at or 0.0, last_at or 0.0)
        if rows > MAX_METRICS // 2:
            pace.every_s = EARLY * max(0.0, pace.last_at - pace.first_at) / rows
        return pace

    def put_member(self, run: str, member: str, incarnation: str, at: float) -> None:
        self._put("INSERT OR IGNORE INTO members VALUES (?,?,?,?,NULL,'')", run, member, incarnation, at)

    def end_member(self, run: str, member: str, at: float, how: str) -> None:
        self._put(
            "UPDATE members SET last_at=?, end=? WHERE run=? AND member=? AND last_at IS NULL", at, how, run, member
        )

    def put_run(self, view: RunView) -> None:
        body = msgspec.json.encode(view)
        self._put("INSERT OR REPLACE INTO runs VALUES (?,?,?)", view.run, view.started, body)

    def put_agent(self, view: AgentView) -> None:
        self._put("INSERT OR REPLACE INTO agents VALUES (?,?)", view.agent, msgspec.json.encode(view))

    def _put(self, statement: str, *values: Any) -> None:
        self._rows.append((statement, values))

    @property
    def pending(self) -> bool:
        """Whether anything was put, or marked, that is not in the file."""
        return bool(self._rows) or self._seq != self._stored_seq

    def take_batch(self) -> RowBatch:
        """Return the rows put since the last call, to be written by any thread."""
        batch = RowBatch(self._rows, self._seq)
        self._rows = []
        return batch

    def return_batch(self, batch: RowBatch) -> None:
        """Put a batch that could not be written before the next one; beyond MAX_ROWS the oldest rows are dropped."""
        self._rows = (batch.rows + self._rows)[-MAX_ROWS:]

    def write_batch(self, batch: RowBatch) -> None:
        with self._lock:
            try:
                self._connection.execute("BEGIN")
                for statement, values in batch.rows:
                    self._execute(statement, values)
                if batch.seq is not None:
                    self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('seq', ?)", (str(batch.seq),))
                self._connection.execute("COMMIT")
                self._stored_seq = batch.seq
            except sqlite3.Error:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _execute(self, statement: str, values: tuple[Any, ...]) -> None:
        """Write one row, or leave it out if a value is of no kind that SQLite has."""
        try:
            self._connection.execute(statement, values)
        except (OverflowError, UnicodeError, sqlite3.InterfaceError, sqlite3.ProgrammingError) as error:
            log.warning("a row of the views was left out: %s", error)

    def sync(self) -> int:
        """Wait until all that was written is on the disk; return the last journal entry of which that is true."""
        with self._lock:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            return self.seq

    def flush(self) -> None:
        """Write all pending rows now; if that fails, keep them for the next time and raise."""
        batch = self.take_batch()
        try:
            self.write_batch(batch)
        except sqlite3.Error:
            self.return_batch(batch)
            raise

    def close(self) -> None:
        try:
            self.flush()
        except sqlite3.Error:
            return
        finally:
            self._connection.close()

    # --- reading

    def runs(self) -> list[RunView]:
        """Return the stored views of runs; those that cannot be decoded are left out, and soon written again."""
        with self._lock:
            rows = self._connection.execute("SELECT view FROM runs ORDER BY created").fetchall()
        views = []
        for row in rows:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                views.append(msgspec.json.decode(row[0], type=RunView))
        return views

    def story(
        self, run: str, since: float = 0.0, member: str = "", after: int = 0, limit: int = 1000
    ) -> list[StoryLine]:
        with self._lock:
            return _story(self._connection, run, since, member, after, limit)


def runs(directory: Path) -> list[RunView]:
    """Return the runs of a coordinator that may have ended, oldest first."""
    rows = _query(directory, "SELECT view FROM runs ORDER BY created")
    return [msgspec.json.decode(row[0], type=RunView) for row in rows]


def agents(directory: Path) -> list[AgentView]:
    rows = _query(directory, "SELECT view FROM agents ORDER BY agent")
    return [msgspec.json.decode(row[0], type=AgentView) for row in rows]


def story(directory: Path, run: str, member: str = "", after: int = 0, limit: int = 1000) -> list[StoryLine]:
    """Return the story of a run from the file alone."""
    if not (directory / FILE).exists():
        return []
    connection = _readonly(directory)
    try:
        row = connection.execute("SELECT created FROM runs WHERE run=?", (run,)).fetchone()
        return _story(connection, run, row[0] if row else 0.0, member, after, limit)
    finally:
        connection.close()


def worlds(directory: Path, run: str) -> list[WorldRow]:
    columns = "number, first_step, last_step, began_at, members, reason"
    rows = _query(directory, f"SELECT {columns} FROM worlds WHERE run=? ORDER BY number", run)
    return [WorldRow(n, first, last, at, tuple(names.split("\n")), why) for n, first, last, at, names, why in rows]


def metrics(directory: Path, run: str) -> list[MetricRow]:
    rows = _query(directory, "SELECT at, step, loss, samples_per_s FROM metrics WHERE run=? ORDER BY at", run)
    return [MetricRow(*row) for row in rows]


def checkpoints(directory: Path, run: str) -> list[tuple[int, str]]:
    """Return steps and paths, oldest first."""
    rows = _query(directory, "SELECT step, path FROM checkpoints WHERE run=? ORDER BY step", run)
    return [(row[0], row[1]) for row in rows]


def _story(
    connection: sqlite3.Connection, run: str, since: float, member: str, after: int, limit: int
) -> list[StoryLine]:
    where = "seq>? AND (run=? OR (run='' AND at>=?))" + (" AND member=?" if member else "")
    values = (after, run, since, *((member,) if member else ()), limit)
    rows = connection.execute(f"SELECT * FROM story WHERE {where} ORDER BY seq LIMIT ?", values).fetchall()
    return [StoryLine(*row) for row in rows]


def _readonly(directory: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{(directory / FILE).absolute().as_uri()}?mode=ro", uri=True)


def _query(directory: Path, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    if not (directory / FILE).exists():
        return []
    connection = _readonly(directory)
    try:
        return connection.execute(statement, values).fetchall()
    finally:
        connection.close()
