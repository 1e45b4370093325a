"""A run with servers under test, and what must hold of it whatever members died."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.process.faults.checked_run import CheckedRun

from shoal.core.membership import events as ev
from shoal.core.runs import events as runs_events
from shoal.core.runs.decide import apply
from shoal.core.runs.state import CoordinatorState
from shoal.store import journal

SCRIPT = Path(__file__).with_name("train.py")


class ServedRun(CheckedRun):
    """A run with parameter servers."""

    script = SCRIPT

    def trainers(self) -> list[str]:
        return sorted(name for name in self.pids() if "server" not in name)

    def servers(self) -> list[str]:
        return sorted(name for name in self.pids() if "server" in name)

    def placements(self) -> list[str]:
        """Return the printed lines about placements, oldest first."""
        return [line for line in self.output.splitlines() if line.startswith("shoal: placement ")]

    def replicated(self) -> bool:
        """Return whether every part has a backup on another living server."""
        lines = self.placements()
        last = lines[-1].rpartition(" (")[0] if lines else ""
        return "copied to" not in last and 0 < last.count("backup") == last.count(";") + 1 and len(self.servers()) == 2

    def spread(self) -> bool:
        """Return whether the shards have their primaries on different servers."""
        parts = self.placements()[-1].rpartition(" (")[0].split(";")
        primaries = [part.partition(" on ")[2].partition(",")[0].strip() for part in parts if "shard" in part]
        return len(set(primaries)) == len(primaries) > 1

    # --- checks

    def check_counts(self) -> None:
        """Fail unless every shard has applied every sample exactly once an epoch."""
        final = torch.load(self.records / "final.pt", weights_only=True)
        epochs = self.plan.get("epochs", 4)
        for name in ("counters.0", "counters.1"):
            assert final[name].unique().tolist() == [epochs], f"{name}: {final[name].unique(return_counts=True)}"
        order = self.order()
        assert {e["step"] for e in self.events() if e["event"] == "done"} == {order.total_steps}

    def check_bound(self, bound: int) -> int:
        """Fail if a trainer began a ticket more than `bound` ahead of another; return the largest lead seen.

        Only finished tickets count: the holder of an unfinished one is dead and is not waited for. Nor does a ticket
        count whose holder was dropped between requesting and finishing it: it was not waited for either, and what it
        then pushed was stale or known already.
        """
        away = self._absences()
        held = [
            (member, clock, began, ended)
            for member, clock, requested, began, ended in self._held()
            if not any(who == member and since <= ended and requested <= until for who, since, until in away)
        ]
        most = 0
        for event in [e for e in self.events() if e["event"] == "begin"]:
            for other, clock, began, ended in held:
                if other != event["member"] and began <= event["at"] < ended:
                    most = max(most, event["clock"] - clock)
                    assert event["clock"] - clock <= bound, f"{event} began while {other} was at {clock}"
            assert event["clock"] - event["low"] <= bound
        return most

    def _absences(self) -> list[tuple[str, float, float]]:
        """Return when the servers did not wait for a trainer, as (trainer, from, until) on the clock of the records.

        The coordinator reports lost trainers, until they rejoin. Trainers that were not connected for a lease are
        dropped by the servers themselves.
        """
        monotonic = time.monotonic() - time.time()
        absences = [(e["whom"], e["at"], e["at"]) for e in self.events() if e["event"] == "dropped"]
        gone: dict[str, float] = {}
        state = CoordinatorState()
        directory = next(self.home.glob("coordinators/*"))
        assert journal.read_snapshot(directory) is None, "the journal was truncated: earlier absences are not known"
        for entry in journal.read(directory):
            event, at = journal.decode_event(entry, runs_events.KINDS), entry.at + monotonic
            for _, told in apply(state, entry.run, event, entry.at):
                if isinstance(told, ev.AnnounceTrainerLost):
                    gone.setdefault(told.member, at)
            if isinstance(event, ev.MemberConnected) and event.member in gone:
                absences.append((event.member, gone.pop(event.member), at))
        return absences + [(member, since, math.inf) for member, since in gone.items()]

    def _held(self) -> list[tuple[str, int, float, float, float]]:
        """Return the finished tickets as (trainer, clock, requested, begun, finished)."""
        begun: dict[int, dict[str, Any]] = {}
        requested: dict[int, float] = {}
        last: dict[int, float] = {}
        tickets = []
        for event in self.events():
            pid, at = event["pid"], event["at"]
            if event["event"] == "begin":
                begun[pid], requested[pid] = event, last.get(pid, at)
            elif event["event"] == "commit" and begun.get(pid, {}).get("ticket") == event["ticket"]:
                tickets.append((event["member"], begun[pid]["clock"], requested[pid], begun[pid]["at"], at))
            last[pid] = at
        return tickets

    def loss(self) -> float:
        """Return the mean loss of the last tickets."""
        last = [e["loss"] for e in self.commits()[-8:]]
        return sum(last) / len(last)


@contextlib.contextmanager
def served_run(
    path: Path, members: str, sync: str, *settings: str, servers: int = 2, **plan: Any
) -> Iterator[ServedRun]:
    run = ServedRun(path, members, (f"sync={sync}", f"servers={servers}", *settings), **plan)
    try:
        yield run
    finally:
        run.close()
