"""Which coordinators there are, and which of their runs is meant."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.errors import AmbiguousRun, CoordinatorUnreachable, ShoalError, UnknownRun, UsageError
from shoal.launch.api_client import ApiClient, open_client
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.wire.api import LogPage, RunView, StoryLine

OVER = ("done", "failed", "stopped", "resumable")
SUPERVISOR = "supervisor"
REVIVED_WITHIN_S = 20.0
LOOK_S = 0.05


class RunRecords(Protocol):
    """What can be read of runs, from a live coordinator or from what an ended one left."""

    def runs(self) -> tuple[RunView, ...]: ...
    def run(self, run: str) -> RunView: ...
    def story(self, run: str, member: str = "", after: int = 0, limit: int = 1000) -> tuple[StoryLine, ...]: ...
    def logs(self, run: str, member: str = "", after: int = 0, limit: int = 1000) -> LogPage: ...


@dataclass(frozen=True, slots=True)
class CoordinatorRef:
    """A coordinator, live (`client`) or ended (only `records`, from its directory)."""

    id: str
    url: str
    token_file: str
    directory: Path | None
    client: ApiClient | None
    records: RunRecords


def coordinators(place: CoordinatorTarget) -> list[CoordinatorRef]:
    """The coordinator at the URL given, or all that have a directory here, the newest first."""
    if place.url:
        return [_at(place)]
    root = place.home / "coordinators"
    if not root.is_dir():
        return []
    found = [_in(directory) for directory in sorted(root.iterdir(), reverse=True) if directory.is_dir()]
    return [one for one in found if one is not None]


def all_runs(place: CoordinatorTarget) -> list[tuple[CoordinatorRef, RunView]]:
    """Every run of every coordinator: those that go on first, then the newest."""
    pairs = [(one, view) for one in coordinators(place) for view in one.records.runs()]
    return sorted(pairs, key=lambda pair: (pair[1].status in OVER, -pair[1].started))


def find_run(place: CoordinatorTarget, wanted: str | None) -> tuple[CoordinatorRef, RunView]:
    """The run that is meant by an id, a name or the beginning of one; without any, the only live or the newest."""
    pairs = all_runs(place)
    if wanted is None:
        if not pairs:
            raise UnknownRun("there is no run", where=place.url or str(place.home), do="start one: shoal run SCRIPT")
        going = [pair for pair in pairs if pair[1].status not in OVER]
        if len(going) > 1:
            raise AmbiguousRun("more than one run goes on", why=_list(going), do="say which one")
        return pairs[0]
    return choose(pairs, wanted, where=place.url or str(place.home))


def choose(
    pairs: Sequence[tuple[CoordinatorRef, RunView]], wanted: str, where: str = ""
) -> tuple[CoordinatorRef, RunView]:
    """The one pair whose run has this id, this name (the one that goes on, else the newest) or this beginning."""
    for pair in pairs:
        if pair[1].run == wanted:
            return pair
    named = [pair for pair in pairs if pair[1].name == wanted]
    going = [pair for pair in named if pair[1].status not in OVER]
    if len(going) > 1:
        raise AmbiguousRun(f"more than one run is called {wanted}", why=_list(going), do="use the id")
    if named:
        return (going or named)[0]
    begun = [pair for pair in pairs if pair[1].run.startswith(wanted) or pair[1].name.startswith(wanted)]
    if len(begun) == 1:
        return begun[0]
    if begun:
        raise AmbiguousRun(f"more than one run begins with {wanted}", why=_list(begun), do="use more of the id")
    near = difflib.get_close_matches(wanted, {name for _, view in pairs for name in (view.name, view.run)}, n=1)
    do = f"did you mean {near[0]}?" if near else "shoal ps lists the runs"
    raise UnknownRun(f"there is no run {wanted}", where=where, do=do)


def live(coordinator: CoordinatorRef) -> ApiClient:
    """The client of a coordinator that must be up."""
    if coordinator.client is None:
        raise CoordinatorUnreachable(
            f"coordinator {coordinator.id} has ended",
            where=str(coordinator.directory or coordinator.url),
            do="shoal resume RUN goes on with one of its runs",
        )
    return coordinator.client


def in_directory(directory: Path) -> CoordinatorRef:
    """The coordinator that has, or had, this directory."""
    found = _in(directory)
    if found is None:
        raise UnknownRun("there is no coordinator", where=str(directory), do="shoal ps lists the runs")
    return found


def alive(pid: int) -> bool:
    """Whether a process of this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def read_text(path: Path) -> str:
    """The stripped text of a small file, empty if there is none."""
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ""


def _at(place: CoordinatorTarget) -> CoordinatorRef:
    if not place.token_file:
        raise UsageError("--url needs --token-file", why="the coordinator answers only to its token")
    client = open_client(place.url, place.token_file)
    health = client.check()
    return CoordinatorRef(health.coordinator, client.url, place.token_file, None, client, client)


def _in(directory: Path) -> CoordinatorRef | None:
    """The coordinator of a directory; one that died under a supervisor's eyes is waited for, because it comes back."""
    deadline = time.monotonic() + REVIVED_WITHIN_S
    while (found := _live_in(directory)) is None and _is_supervised(directory) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    if found is not None:
        return found
    url = read_text(directory / "url")
    if not url and not (directory / "journal.jsonl").exists():
        return None
    from shoal.launch.offline_records import OfflineRecords

    return CoordinatorRef(directory.name, url, str(directory / "token"), directory, None, OfflineRecords(directory))


def _live_in(directory: Path) -> CoordinatorRef | None:
    url, pid = read_text(directory / "url"), read_text(directory / "pid")
    token_file = directory / "token"
    if not (url and pid.isdigit() and alive(int(pid)) and token_file.exists()):
        return None
    client = open_client(url, str(token_file), timeout_s=5.0)
    try:
        # A process id is used again, and so may a port be: only the coordinator itself can say that it lives.
        if client.check().coordinator == directory.name:
            return CoordinatorRef(directory.name, url, str(token_file), directory, client, client)
    except ShoalError:
        client.close()
    return None


def _is_supervised(directory: Path) -> bool:
    """Whether the command lives that would start this coordinator again."""
    pid = read_text(directory / SUPERVISOR)
    return pid.isdigit() and int(pid) != os.getpid() and alive(int(pid))


def _list(pairs: Iterable[tuple[CoordinatorRef, RunView]]) -> str:
    return ", ".join(f"{view.run} ({view.name}, {view.status})" for _, view in pairs)
