"""The shell around the decisions: events come in, are journaled, decided, and carried out, one at a time.

Everything here runs on one event loop and handles an event to its end before the next, so there is no queue to wait in.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from shoal.coordinator import dispatch
from shoal.coordinator import live_state as present
from shoal.coordinator.connections import AgentConnection, Connection
from shoal.coordinator.storage import view_rows
from shoal.coordinator.storage.logs import Logs
from shoal.core.fleet import decide as fl
from shoal.core.fleet import events as fe
from shoal.core.membership import decide as mb
from shoal.core.membership import events as ev
from shoal.core.membership import leases
from shoal.core.provisioning import events as se
from shoal.core.runs import evaluation
from shoal.core.runs import events as runs_events
from shoal.core.runs.state import Asked, CoordinatorState, RunState
from shoal.errors import JournalUnwritable
from shoal.report.tensorboard.writer import EventFiles, folder_of
from shoal.store.journal import Journal, JournalEntry, event_of, last_at
from shoal.store.sqlite_views import SqliteViews
from shoal.wire import codec
from shoal.wire import member_messages as ms
from shoal.wire.api import AgentView, PoolView, RunView, StoryLine

log = logging.getLogger("shoal.coordinator")

MAX_HELD = 100_000
TICK_S = 0.05
OVERSLEPT_S = 1.0
LISTEN_AGAIN_S = 0.5
FLUSH_S = 0.2
SHOW_S = 0.002


class MonotonicWallClock:
    """Wall-clock time that never jumps: read once, then counted."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._start = max(time.time(), not_before)
        self._mark = time.monotonic()

    def now(self) -> float:
        return self._start + time.monotonic() - self._mark


class CoordinatorService:
    """The state of all runs of one coordinator, and the way from an event to its effects."""

    def __init__(self, directory: Path, journal: Journal, views: SqliteViews, name: str) -> None:
        self.directory = directory
        self.name = name
        self.runs = CoordinatorState()
        self.agents: dict[str, AgentConnection] = {}
        self.trouble: JournalUnwritable | None = None
        self.logs = Logs(directory)
        self._journal = journal
        self._views = views
        self._reports = EventFiles(log.warning)
        self._live: dict[str, present.LiveRun] = {}
        self._held: deque[Callable[[], object]] = deque()
        self._changed: set[str] = set()
        self._flushing = asyncio.Lock()
        self._shown: dict[str, AgentView] = {}
        self._fleet_shown: fl.FleetState | None = None
        self._shown_at: dict[str, float] = {}
        self._fired: dict[tuple[str, str], float] = {}
        self.clock = MonotonicWallClock(last_at(journal.entries))
        self._ticked_at = self.heard_at = self.clock.now()
        self._deaf_until = 0.0
        self._at_every_tick: list[Callable[[float], None]] = []
        self.hire: Callable[[se.Instruction], None] = lambda _instruction: None

    # --- the one way in

    def record(self, run: str, event: Any) -> Asked:
        """Journal an event and decide about it; carrying out is left to the caller."""
        at = self.clock.now()
        entry = self._journal.append(run, event, at)
        return self._take_in(entry, event, at)

    def handle(self, run: str, event: Any) -> None:
        self.carry_out(self.record(run, event))

    def _take_in(self, entry: JournalEntry, event: Any, at: float, *, shown: bool = False) -> Asked:
        run = getattr(event, "run", "") or entry.run
        asked = self.runs.apply(entry.run, event, at)
        if isinstance(event, runs_events.ProgressMeasured):
            self.live(run).measured = event
        if not shown:
            self._report(view_rows.put(self._views, entry, event, asked, self.runs.runs.get(run)))
        self._changed.update(name for name, _ in asked)
        self._changed.add(run)
        return asked

    def _report(self, lines: list[StoryLine]) -> None:
        for line in lines:
            run = self.runs.runs.get(line.run)
            if run is not None and run.tensorboard:
                self._reports.tell(self.run_dir(run.name), line, run.membership.step)

    def replay(self) -> None:
        """Be what the journal says, and begin anew: all connections are gone."""
        shown = self._views.seq
        if shown > self._journal.seq:
            shown = self._views.forget()
        for entry in self._journal.entries:
            event = event_of(entry, runs_events.KINDS)
            # As when it happened: an event that could not be handled then cannot be handled now.
            self._try(partial(self._take_in, entry, event, entry.at, shown=entry.seq <= shown))
        self._journal.entries.clear()
        self.handle("", fe.CoordinatorStarted(secrets.token_hex(4)))
        for run in self.runs.runs.values():
            if not run.over:
                self.handle(run.name, ev.CoordinatorRestarted())

    def live(self, run: str) -> present.LiveRun:
        return self._live.setdefault(run, present.LiveRun())

    def attempt(self, action: Callable[[], object]) -> None:
        """Do something that is journaled; while the journal cannot be written, it waits in line."""
        if self._held:
            if len(self._held) < MAX_HELD:
                self._held.append(action)
        elif not self._try(action):
            self._held.append(action)

    def _try(self, action: Callable[[], object]) -> bool:
        """Whether it is done with; False while the journal cannot be written."""
        try:
            action()
        except JournalUnwritable as error:
            if self.trouble is None:
                log.error("%s", error)
            self.trouble = error
            return False
        except Exception:
            # One event that we got wrong must not cost all others the coordinator.
            log.exception("an event could not be handled")
        return True

    def _retry(self) -> None:
        while self._held:
            if not self._try(self._held[0]):
                return
            self._held.popleft()
        self.trouble = None

    def still_in_trouble(self) -> JournalUnwritable | None:
        """Why nothing can be changed now, if so."""
        self._retry()
        return self.trouble

    # --- carrying out

    def carry_out(self, asked: Asked) -> None:
        for run, instruction in asked:
            if isinstance(instruction, fe.StartProcess):
                self._start_process(instruction)
            elif isinstance(instruction, fe.StopProcess):
                link = self.agents.get(instruction.agent)
                if link is not None:
                    link.send(dispatch.end_member(instruction))
            elif isinstance(instruction, se.SubmitAllocation | se.CancelAllocation):
                self.hire(instruction)
            elif isinstance(instruction, ev.RejectMember):
                self._refuse(run, instruction)
            else:
                self._tell_members(run, instruction)

    def _tell_members(self, run: str, instruction: Any) -> None:
        told = dispatch.to_members(instruction)
        if told is None:
            return
        (names, message), links = told, self.live(run).links
        data = codec.to_member.encode(message)
        for member in names:
            link = links.get(member)
            if link is not None:
                link.post(data)
                if isinstance(message, ms.EvictedMsg):
                    link.expelled = member not in self.runs.runs[run].membership.members

    def _refuse(self, run: str, refusal: ev.RejectMember) -> None:
        link = self.live(run).links.get(refusal.member)
        if link is not None and link.incarnation == refusal.incarnation:
            del self.live(run).links[refusal.member]
            link.refuse(refusal.code, refusal.what, refusal.why, refusal.do)

    def _start_process(self, asked: fe.StartProcess) -> None:
        link, run = self.agents.get(asked.agent), self.runs.runs[asked.run]
        if link is not None:
            link.send(dispatch.start_member(asked, run.spec, run.settings, link.base_url, self.run_dir(asked.run)))

    # --- time

    def at_every_tick(self, action: Callable[[float], None]) -> None:
        self._at_every_tick.append(action)

    def tick(self) -> None:
        """Whatever is due."""
        if self._held:
            self._retry()
            if self._held:
                return
        now = self.clock.now()
        self._forgive_own_sleep(now)
        if now < self._deaf_until:
            return
        for run in list(self.runs.runs.values()):
            if not run.over and not run.spec.compat:
                beats, hearing = self.live(run.name).beats, self._hearing(run, now)
                for event in (
                    *mb.due(run.membership, beats, now, hearing),
                    *evaluation.due(run.evaluation, beats, now),
                ):
                    if self._is_fresh(run.name, event, now):
                        self.attempt(partial(self.handle, run.name, event))
        for wait in fl.due(self.runs.fleet, now):
            self.attempt(partial(self.handle, wait.run, wait))
        for action in self._at_every_tick:
            action(now)

    def _forgive_own_sleep(self, now: float) -> None:
        """Silence while this process did not run (stopped, swapped out, a suspended machine) is nobody's silence."""
        slept_s = now - self._ticked_at - TICK_S
        self._ticked_at = now
        if slept_s < OVERSLEPT_S:
            return
        self._deaf_until = now + LISTEN_AGAIN_S
        for live in self._live.values():
            for member, beat in live.beats.items():
                live.beats[member] = replace(beat, at=min(now, beat.at + slept_s + LISTEN_AGAIN_S))
        for link in self.agents.values():
            link.heard_at = now
        if self.runs.supply.allocations or self.runs.supply.demands:
            self.attempt(partial(self.handle, "", se.CoordinatorWasDown(slept_s)))

    def hung_up(self, link: Connection) -> None:
        """A connection is over; that the other side closed it is a sign of it, too."""
        if not link.closed:
            self.heard_at = self.clock.now()
        link.closed = True

    def _hearing(self, run: RunState, now: float) -> leases.CoordinatorReachability:
        """How well members are heard now: silence of all, of every run, and their agents is most likely our own."""
        live = self.live(run.name)
        if live.hearing is None or not run.membership.members:
            live.hearing = leases.CoordinatorReachability(
                now, leases.silence_limit_s(run.heartbeat_s, run.membership.settings.lease_s)
            )
        before, live.hearing = live.hearing, live.hearing.received(self.heard_at)
        if live.hearing.restored_at != before.restored_at:
            deaf_s = live.hearing.last_received - before.last_received
            log.warning("nobody was heard for %.1f s: leases of run %s begin anew", deaf_s, run.name)
        return live.hearing

    def _is_fresh(self, run: str, event: ev.Event, now: float) -> bool:
        """A timer that changes nothing is not journaled at every tick."""
        if not isinstance(event, ev.TimerFired):
            return True
        key = (run, event.what)
        if now - self._fired.get(key, 0.0) < 1.0 and self._fired.get(key) is not None:
            return False
        self._fired[key] = now
        return True

    async def keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    async def keep_views(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Write the views and reports in another thread, so that no member waits for SQLite or a file.

        One after the other: what is older must not be written over what is newer.
        """
        async with self._flushing:
            self._show_changes()
            if self._reports.waiting:
                await asyncio.to_thread(self._reports.write)
            batch = self._views.take()
            if not batch.rows:
                return
            try:
                await asyncio.to_thread(self._views.write, batch)
            except sqlite3.Error:
                self._views.give_back(batch)

    def _show_changes(self) -> None:
        changed, self._changed = self._changed & self.runs.runs.keys(), set()
        for name in changed:
            if self._is_too_soon(name):
                self._changed.add(name)
                continue
            view = self.view(name)
            self._views.put_run(view)
            if view.tensorboard:
                self._reports.show(view, present.step_s(self.live(name)), self.clock.now())
            if self.runs.runs[name].over:
                self.logs.close(name)
        self._show_agents()

    def _is_too_soon(self, name: str) -> bool:
        """A run of very many is shown a little more rarely, as long as it goes on."""
        run, now = self.runs.runs[name], self.clock.now()
        if not run.over and now - self._shown_at.get(name, 0.0) < SHOW_S * len(run.membership.members):
            return True
        self._shown_at[name] = now
        return False

    def _show_agents(self) -> None:
        """Those of whom there is news; how busy they are and when they were heard is asked of who is alive."""
        if self.runs.fleet is self._fleet_shown:
            return
        self._fleet_shown = self.runs.fleet
        for view in self.agent_views():
            known = structs.replace(view, beat_age_s=0.0, load=0.0)
            if self._shown.get(view.agent) != known:
                self._shown[view.agent] = known
                self._views.put_agent(view)

    async def settle(self, keepers: Collection[asyncio.Task[None]]) -> None:
        """End those that keep time and views, but not in the middle of writing: a thread would go on with it alone."""
        async with self._flushing:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    def close(self) -> None:
        # Machines are paid for until they are given back, which is after the end of their run.
        self._changed.update(self.runs.supply.account.runs)
        self._shown_at.clear()
        self._show_changes()
        self._reports.close()
        self._views.close()
        self.logs.close()
        self._journal.close()

    # --- what is shown

    def run_dir(self, run: str) -> str:
        return str(self.directory / "runs" / run)

    def view(self, name: str) -> RunView:
        run = self.runs.runs[name]
        view = present.run_view(run, self.runs, self.live(name), self.run_dir(name), self.clock.now())
        if not run.tensorboard:
            return view
        where = folder_of(view.directory)
        return structs.replace(view, tensorboard=where, tensorboard_error=self._reports.trouble(name))

    def run_views(self) -> list[RunView]:
        return [self.view(name) for name in self.runs.runs]

    def agent_views(self) -> list[AgentView]:
        return present.agent_views(self.runs, self.agents, self.clock.now())

    def pool_views(self) -> list[PoolView]:
        return present.pool_views(self.runs, self.clock.now())

    async def story(self, run: RunState, member: str, after: int, limit: int) -> list[StoryLine]:
        await self.flush()
        return await asyncio.to_thread(self._views.story, run.name, run.created, member, after, limit)
