"""Commit logs of a job's members, one file per process."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.processes import is_running


@dataclass(frozen=True, slots=True)
class Commit:
    """A step that one process applied. `samples` is 0 if it only received the step."""

    pid: int
    step: int
    at: float
    world: str
    size: int
    samples: int


class TimedOutError(Exception):
    """An expected commit did not happen in time."""


class Commits:
    """All commits of a job so far, in order of time. `running` says whether a process is alive."""

    def __init__(self, directory: Path, running: Callable[[int], bool] = is_running) -> None:
        self._directory = directory
        self._running = running
        self._read: dict[Path, int] = {}
        self._all: list[Commit] = []

    def refresh(self) -> list[Commit]:
        """Read new lines of the logs and return all commits."""
        for path in self._directory.glob("*.commits"):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                step, at, world, size, samples = line.split()
                self._all.append(Commit(int(path.stem), int(step), float(at), world, int(size), int(samples)))
        self._all.sort(key=lambda commit: commit.at)
        return self._all

    def after(self, at: float) -> list[Commit]:
        return [commit for commit in self.refresh() if commit.at > at]

    def before(self, at: float, within_s: float = float("inf")) -> list[Commit]:
        return [commit for commit in self.refresh() if at - within_s <= commit.at <= at]

    def wait_for(
        self,
        matches: Callable[[Commit], bool],
        since: float,
        timeout_s: float,
        alive: Callable[[], bool] = lambda: True,
    ) -> Commit:
        """Return the first commit after `since` that `matches` accepts; raise TimedOutError if there is none."""
        ends = time.monotonic() + timeout_s
        while True:
            over = not alive() or time.monotonic() > ends
            for commit in self.after(since):
                if matches(commit):
                    return commit
            if over:
                raise TimedOutError(f"no such commit in {timeout_s:.0f} s")
            time.sleep(0.02)

    def wait_until_steady(self, members: int, timeout_s: float, alive: Callable[[], bool] = lambda: True) -> list[int]:
        """Wait until `members` processes have contributed to the last ten steps of one world; return their pids."""
        ends = time.monotonic() + timeout_s
        while time.monotonic() < ends and alive():
            recent: dict[int, set[int]] = {}
            commits = self.refresh()
            for commit in commits[-12 * members :]:
                if commit.world == commits[-1].world and commit.size == members and commit.samples:
                    recent.setdefault(commit.pid, set()).add(commit.step)
            steady = [pid for pid, steps in recent.items() if len(steps) >= 10 and self._running(pid)]
            if len(steady) == members and time.monotonic() - commits[-1].at < 2.0:
                return sorted(steady)
            time.sleep(0.05)
        raise TimedOutError(f"{members} members did not train together within {timeout_s:.0f} s")


def step_time_s(commits: list[Commit]) -> float:
    """Return the median time between consecutive commits of one process."""
    return median(gaps_s(commits) or [0.0])


def gaps_s(commits: list[Commit]) -> list[float]:
    """Return the times between consecutive commits of each process."""
    by_pid: dict[int, list[float]] = {}
    for commit in commits:
        by_pid.setdefault(commit.pid, []).append(commit.at)
    return [later - earlier for times in by_pid.values() for earlier, later in pairwise(times)]


def longest_gap_s(commits: list[Commit], pids: Collection[int], since: float) -> float:
    """Return the longest gap between commits of any of `pids` (of all processes if empty) that ends after `since`."""
    longest = 0.0
    for group in [{pid} for pid in pids] or [{commit.pid for commit in commits}]:
        times = [commit.at for commit in commits if commit.pid in group]
        longest = max([longest, *(later - earlier for earlier, later in pairwise(times) if later > since)])
    return longest


def steps_lost(before: list[Commit], after: list[Commit]) -> int:
    """Return how many steps committed before a fault were committed again after it, in another world."""
    again = [commit.step for commit in after if commit.world != before[-1].world]
    reached = max(commit.step for commit in before)
    return max(0, reached + 1 - min(again, default=reached + 1))
