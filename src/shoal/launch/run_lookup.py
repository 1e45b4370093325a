"""Lookup of coordinators, and of the run that a user names by an id, a name or the beginning of one.

See the package docstring for how a coordinator is found to be live. Callers get the same `RunRecords` from a live and
from an ended coordinator, so `shoal ps`, `status`, `why` and `logs` do not care which it is; verbs that change a run
need the live one and call `require_live`. A directory that cannot be read hides no run of the others: it is returned
as a `DamagedCoordinator`.
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.engines import process_tree
from shoal.errors import AmbiguousRun, CoordinatorUnreachable, ShoalError, UnknownRun, UsageError
from shoal.launch.api_client import ApiClient, open_client
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.wire.api import LogPage, RunView, StoryLine

STORY_PAGE = 1000
ENDED = ("done", "failed", "stopped", "resumable")
SUPERVISOR_FILE = "supervisor"
RESTART_WITHIN_S = 20.0
POLL_S = 0.05


class RunRecords(Protocol):
    """The readable side of a coordinator: live, over HTTP, or ended, from its directory."""

    def runs(self) -> tuple[RunView, ...]: ...
    def run(self, run: str) -> RunView: ...
    def story(self, run: str, member: str = "", after: int = 0, limit: int = 1000) -> tuple[StoryLine, ...]: ...
    def logs(self, run: str, member: str = "", after: int = 0, limit: int = 1000) -> LogPage: ...


@dataclass(frozen=True, slots=True)
class CoordinatorRef:
    """A coordinator: live if it has a `client`, otherwise ended, with only the `records` of its directory."""

    id: str
    url: str
    token_file: str
    directory: Path | None
    client: ApiClient | None
    records: RunRecords


@dataclass(frozen=True, slots=True)
class DamagedCoordinator:
    """A coordinator directory whose runs cannot be read, and why."""

    directory: Path
    error: ShoalError


def coordinators(target: CoordinatorTarget) -> list[CoordinatorRef]:
    """Return the coordinator at the target's URL, or all that have a directory here, newest first."""
    if target.url:
        return [_at_url(target)]
    root = target.home / "coordinators"
    if not root.is_dir():
        return []
    refs = [_in_directory(directory) for directory in sorted(root.iterdir(), reverse=True) if directory.is_dir()]
    return [ref for ref in refs if ref is not None]


def all_runs(target: CoordinatorTarget) -> list[tuple[CoordinatorRef, RunView]]:
    """Return every run of every coordinator that can be read: active ones first, then the newest."""
    return runs_and_damage(target)[0]


def runs_and_damage(
    target: CoordinatorTarget,
) -> tuple[list[tuple[CoordinatorRef, RunView]], list[DamagedCoordinator]]:
    """Return all runs, as `all_runs` does, and the coordinator directories that cannot be read."""
    pairs: list[tuple[CoordinatorRef, RunView]] = []
    damaged: list[DamagedCoordinator] = []
    for coordinator in coordinators(target):
        try:
            pairs += [(coordinator, view) for view in coordinator.records.runs()]
        except ShoalError as error:
            if coordinator.directory is None:
                raise
            damaged.append(DamagedCoordinator(coordinator.directory, error))
    return sorted(pairs, key=lambda pair: (pair[1].status in ENDED, -pair[1].started)), damaged


def find_run(target: CoordinatorTarget, wanted: str | None) -> tuple[CoordinatorRef, RunView]:
    """Return the run with this id, name or beginning of one; without any, the only active run or the newest."""
    pairs, damaged = runs_and_damage(target)
    if not pairs and damaged:
        raise damaged[0].error
    if wanted is None:
        if not pairs:
            raise UnknownRun("no runs yet", where=target.url or str(target.home), do="start one: shoal run SCRIPT")
        active = [pair for pair in pairs if pair[1].status not in ENDED]
        if len(active) > 1:
            raise AmbiguousRun("several runs are active", why=_list(active), do="name one of them")
        return pairs[0]
    try:
        return select_run(pairs, wanted, where=target.url or str(target.home))
    except UnknownRun as error:
        if damaged:
            error.why = f"it may be in {damaged[0].directory}, which cannot be read (shoal ps says why)"
        raise


def select_run(
    pairs: Sequence[tuple[CoordinatorRef, RunView]], wanted: str, where: str = ""
) -> tuple[CoordinatorRef, RunView]:
    """Return the pair whose run has this id, this name (the active one, else the newest) or this beginning."""
    for pair in pairs:
        if pair[1].run == wanted:
            return pair
    named = [pair for pair in pairs if pair[1].name == wanted]
    active = [pair for pair in named if pair[1].status not in ENDED]
    if len(active) > 1:
        raise AmbiguousRun(f"several active runs are called {wanted}", why=_list(active), do="use the id")
    if named:
        return (active or named)[0]
    matching = [pair for pair in pairs if pair[1].run.startswith(wanted) or pair[1].name.startswith(wanted)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise AmbiguousRun(f"several runs begin with {wanted}", why=_list(matching), do="use more of the id")
    near = difflib.get_close_matches(wanted, {name for _, view in pairs for name in (view.name, view.run)}, n=1)
    do = f"did you mean {near[0]}?" if near else "shoal ps lists the runs"
    raise UnknownRun(f"unknown run {wanted}", where=where, do=do)


def whole_story(records: RunRecords, run: str) -> list[StoryLine]:
    """Return all lines of a story, fetched page by page."""
    lines: list[StoryLine] = []
    while page := records.story(run, "", lines[-1].seq if lines else 0, STORY_PAGE):
        lines.extend(page)
    return lines


def require_live(coordinator: CoordinatorRef) -> ApiClient:
    """Return the client of a coordinator; raise CoordinatorUnreachable if it has ended."""
    if coordinator.client is None:
        raise CoordinatorUnreachable(
            f"coordinator {coordinator.id} has ended",
            where=str(coordinator.directory or coordinator.url),
            do="shoal resume RUN continues one of its runs",
        )
    return coordinator.client


def coordinator_in(directory: Path) -> CoordinatorRef:
    """Return the coordinator, live or ended, that owns this directory."""
    coordinator = _in_directory(directory)
    if coordinator is None:
        raise UnknownRun("no coordinator uses this directory", where=str(directory), do="shoal ps lists the runs")
    return coordinator


def check_member(records: RunRecords, view: RunView, member: str) -> None:
    """Raise UsageError with the members that exist if the run never had this member."""
    if member in {known.member for known in view.members} or records.story(view.run, member, 0, 1):
        return
    lines = whole_story(records, view.run)
    names = sorted({known.member for known in view.members} | {line.member for line in lines if line.member})
    do = f"its members are {', '.join(names)}" if names else "it has had no members yet"
    raise UsageError(f"run {view.run} has no member {member}", do=do)


def process_exists(pid: int) -> bool:
    """Return whether a process with this pid runs; a zombie, which its parent has yet to collect, does not."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    process = process_tree.stat(pid)
    return process is not None and process.state not in "ZX"


def read_text(path: Path) -> str:
    """Return the stripped text of a small file, empty if there is none."""
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ""


def _at_url(target: CoordinatorTarget) -> CoordinatorRef:
    if not target.token_file:
        raise UsageError("--url needs --token-file", why="the coordinator answers only to its token")
    client = open_client(target.url, target.token_file)
    health = client.check()
    return CoordinatorRef(health.coordinator, client.url, target.token_file, None, client, client)


def _in_directory(directory: Path) -> CoordinatorRef | None:
    """Return the coordinator of a directory; wait for one that its supervisor is about to restart."""
    deadline = time.monotonic() + RESTART_WITHIN_S
    while (coordinator := _live_in(directory)) is None and is_supervised(directory) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if coordinator is not None:
        return coordinator
    url = read_text(directory / "url")
    if not url and not (directory / "journal.jsonl").exists():
        return None
    from shoal.launch.offline_records import OfflineRecords

    return CoordinatorRef(directory.name, url, str(directory / "token"), directory, None, OfflineRecords(directory))


def _live_in(directory: Path) -> CoordinatorRef | None:
    url, pid = read_text(directory / "url"), read_text(directory / "pid")
    token_file = directory / "token"
    if not (url and pid.isdigit() and process_exists(int(pid)) and token_file.exists()):
        return None
    client = open_client(url, str(token_file), timeout_s=5.0)
    try:
        # Process ids and ports are reused: only an answer with the right name proves that this coordinator lives.
        if client.check().coordinator == directory.name:
            return CoordinatorRef(directory.name, url, str(token_file), directory, client, client)
    except ShoalError:
        client.close()
    return None


def is_supervised(directory: Path) -> bool:
    """Return whether another process is alive that would restart this coordinator."""
    pid = read_text(directory / SUPERVISOR_FILE)
    return pid.isdigit() and int(pid) != os.getpid() and process_exists(int(pid))


def _list(pairs: Iterable[tuple[CoordinatorRef, RunView]]) -> str:
    return ", ".join(f"{view.run} ({view.name}, {view.status})" for _, view in pairs)
