"""A run with servers under test: what its trainers recorded, and what must hold of it whoever died."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.process.faults.stage import Stage

from shoal.core.membership import events as ev
from shoal.core.runs import events as runs_events
from shoal.core.runs.decide import apply
from shoal.core.runs.state import CoordinatorState
from shoal.store import journal

SCRIPT = Path(__file__).with_name("train.py")


class Served(Stage):
    """One run with `--sync`."""

    script = SCRIPT

    def trainers(self) -> list[str]:
        return sorted(name for name in self.pids() if "server" not in name)

    def servers(self) -> list[str]:
        return sorted(name for name in self.pids() if "server" in name)

    def placements(self) -> list[str]:
        """All that was said of placements, oldest first."""
        return [line for line in self.output.splitlines() if line.startswith("shoal: placement ")]

    def replicated(self) -> bool:
        """Whether every part has a backup on another server that lives."""
        told = self.placements()
        last = told[-1].rpartition(" (")[0] if told else ""
        return "copied to" not in last and 0 < last.count("backup") == last.count(";") + 1 and len(self.servers()) == 2

    # --- promises

    def check_counts(self) -> None:
        """Every shard has taken in every sample exactly once an epoch."""
        final = torch.load(self.records / "final.pt", weights_only=True)
        epochs = self.plan.get("epochs", 4)
        for name in ("counters.0", "counters.1"):
            assert final[name].unique().tolist() == [epochs], f"{name}: {final[name].unique(return_counts=True)}"
        order = self.order()
        assert {e["step"] for e in self.events() if e["event"] == "done"} == {order.total_steps}

    def check_bound(self, bound: int) -> int:
        """Nobody began a ticket while somebody who finished its own was more than `bound` behind; the most there was.

        A ticket that was never finished does not count: whoever held it is gone, and nobody waits for the dead. Nor
        does one whose holder was given up between asking for it and finishing it: nobody waited for that either, and
        what it then pushes is too old, or known already.
        """
        away = self._absences()
        held = [
            (member, clock, began, ended)
            for member, clock, asked, began, ended in self._held()
            if not any(who == member and since <= ended and asked <= until for who, since, until in away)
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
        """For whom the servers did not wait, from when until when, on the clock of the records.

        The coordinator tells them whom it has given up, until that joins anew. Those who were not connected for a lease
        they drop themselves.
        """
        monotonic = time.monotonic() - time.time()
        found = [(e["whom"], e["at"], e["at"]) for e in self.events() if e["event"] == "dropped"]
        gone: dict[str, float] = {}
        state = CoordinatorState()
        for entry in journal.read(next(self.home.glob("coordinators/*/journal.jsonl"))):
            event, at = journal.decode_event(entry, runs_events.KINDS), entry.at + monotonic
            for _, told in apply(state, entry.run, event, entry.at):
                if isinstance(told, ev.AnnounceTrainerLost):
                    gone.setdefault(told.member, at)
            if isinstance(event, ev.MemberConnected) and event.member in gone:
                found.append((event.member, gone.pop(event.member), at))
        return found + [(member, since, math.inf) for member, since in gone.items()]

    def _held(self) -> list[tuple[str, int, float, float, float]]:
        """Tickets that were finished, as (trainer, clock, asked for, begun, finished)."""
        begun: dict[int, dict[str, Any]] = {}
        asked: dict[int, float] = {}
        last: dict[int, float] = {}
        found = []
        for event in self.events():
            pid, at = event["pid"], event["at"]
            if event["event"] == "begin":
                begun[pid], asked[pid] = event, last.get(pid, at)
            elif event["event"] == "commit" and begun.get(pid, {}).get("ticket") == event["ticket"]:
                found.append((event["member"], begun[pid]["clock"], asked[pid], begun[pid]["at"], at))
            last[pid] = at
        return found

    def loss(self) -> float:
        """The mean loss of the last tickets."""
        last = [e["loss"] for e in self.commits()[-8:]]
        return sum(last) / len(last)


@contextlib.contextmanager
def served(path: Path, members: str, sync: str, *settings: str, servers: int = 2, **plan: Any) -> Iterator[Served]:
    run = Served(path, members, (f"sync={sync}", f"servers={servers}", *settings), **plan)
    try:
        yield run
    finally:
        run.close()
