"""View writer: keeps the stored views and TensorBoard files up to date, off the event loop.

Rows and story lines are queued as events are applied. `flush` adds the views of runs and agents that changed since, and
writes everything in another thread, so that no member waits for SQLite or a file. One flush at a time: an older view
must never be written over a newer one.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Collection
from typing import Any

from msgspec import structs

from shoal.coordinator import api_views
from shoal.coordinator.live_state import LiveState, progress_shown, usual_step_s
from shoal.coordinator.storage import view_rows
from shoal.coordinator.storage.logs import Logs
from shoal.core.fleet.state import FleetState
from shoal.core.runs import story
from shoal.core.runs.decide import Instructions
from shoal.core.runs.events import ProgressMeasured
from shoal.core.runs.state import CoordinatorState, RunState
from shoal.report.tensorboard.writer import EventFiles, folder_of
from shoal.store.journal import JournalEntry
from shoal.store.sqlite_views import MetricRow, SqliteViews
from shoal.wire.api import AgentView, PoolView, RunView, StoryLine

log = logging.getLogger("shoal.coordinator")

FLUSH_S = 0.2
# A run of a thousand members is shown every two seconds.
SHOW_S_PER_MEMBER = 0.002


class ViewWriter:
    """The views of one coordinator: current ones on request, stored ones soon after every change."""

    def __init__(
        self, state: CoordinatorState, live: LiveState, run_dir: Callable[[str], str], views: SqliteViews, logs: Logs
    ) -> None:
        self._state, self._live, self._run_dir, self._views, self._logs = state, live, run_dir, views, logs
        self._event_files = EventFiles(log.warning)
        self._flushing = asyncio.Lock()
        self._changed: set[str] = set()
        self._shown_at: dict[str, float] = {}
        self._shown_fleet: FleetState | None = None
        self._shown_agents: dict[str, AgentView] = {}

    # --- views on request

    def run(self, name: str) -> RunView:
        """Return the current view of a run."""
        run, now = self._state.runs[name], self._live.clock.now()
        view = api_views.run_view(run, self._state, self._live.run(name), self._run_dir(name), now)
        if not run.tensorboard:
            return view
        folder, error = folder_of(view.directory), self._event_files.error_of(name)
        return structs.replace(view, tensorboard=folder, tensorboard_error=error)

    def runs(self) -> list[RunView]:
        """Return the views of all runs; one that cannot be made is left out, and the log says why."""
        views = (self._run_or_none(name) for name in self._state.runs)
        return [view for view in views if view is not None]

    def _run_or_none(self, name: str) -> RunView | None:
        try:
            return self.run(name)
        except Exception:
            # One run that cannot be shown must not hide the others, and never end the coordinator.
            log.exception("run %s cannot be shown", name)
            return None

    def agents(self) -> list[AgentView]:
        return api_views.agent_views(self._state, self._live.agents, self._live.clock.now())

    def pools(self) -> list[PoolView]:
        return api_views.pool_views(self._state.provisioning, self._live.clock.now())

    async def story(self, run: RunState, member: str, after: int, limit: int) -> list[StoryLine]:
        """Return the story lines of a run after a position, up to the latest event."""
        await self.flush()
        return await asyncio.to_thread(self._views.story, run.name, run.created, member, after, limit)

    # --- stored views

    def shown_up_to(self, seq: int, snapshot_seq: int) -> int:
        """Return the last entry of the journal, which ends with `seq`, that the stored views contain.

        Views that are ahead of the journal either survived a power failure that cut it, or belong to another journal.
        The former alone have the story up to a snapshot, so they lose only what is ahead; without a snapshot nothing
        is lost by making all of them again.
        """
        if self._views.seq <= seq:
            return self._views.seq
        return self._views.cut_back(seq, story.first_line(seq + 1)) if snapshot_seq else self._views.clear()

    def stored_progress(self) -> dict[str, ProgressMeasured]:
        """Return the latest measurement of each run that the stored views show: a crashed coordinator kept no other."""
        return {view.run: progress_shown(view) for view in self._views.runs() if view.loss is not None or view.metrics}

    def add(self, entry: JournalEntry, event: Any, instructions: Instructions, *, shown: bool = False) -> None:
        """Queue the rows of one event, unless they were stored already, and mark its runs as changed."""
        name = getattr(event, "run", "") or entry.run
        self._changed.update((name, *(run for run, _ in instructions)))
        if not shown:
            self._put_rows(entry, event, instructions, name)

    def _put_rows(self, entry: JournalEntry, event: Any, instructions: Instructions, name: str) -> None:
        try:
            for line in view_rows.put(self._views, entry, event, instructions, self._state.runs.get(name)):
                run = self._state.runs.get(line.run)
                if run is not None and run.tensorboard:
                    self._event_files.record_line(self._run_dir(run.name), line, run.membership.step)
        except Exception:
            # The event is journaled and applied: its instructions must be carried out, whatever its rows are.
            log.exception("event %d of run %s cannot be shown", entry.seq, name)

    def add_metric(self, run: str, at: float, progress: ProgressMeasured) -> None:
        """Queue the row of a measurement, and mark its run as changed."""
        self._views.put_metric(run, MetricRow(at, progress.step, progress.loss, progress.samples_per_s))
        self._changed.add(run)

    def show_again(self, seq: int, at: float, *, complete: bool) -> None:
        """Queue all runs of a restored state; if the rows of events up to `seq` are gone, say so in the story."""
        self._changed.update(self._state.runs)
        if not complete:
            self._views.put_lines([story.lost_history(seq, at)])

    async def write_forever(self) -> None:
        """Flush every fifth of a second until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Write all queued rows and files; rows that SQLite does not take now are kept for the next flush."""
        async with self._flushing:
            self._queue_changes()
            if self._event_files.pending:
                await asyncio.to_thread(self._event_files.write)
            if not self._views.pending:
                return
            batch = self._views.take_batch()
            try:
                await asyncio.to_thread(self._views.write_batch, batch)
            except sqlite3.Error:
                self._views.return_batch(batch)

    async def store_up_to(self, seq: int) -> bool:
        """Write and sync all rows of the events up to `seq`; return whether that worked."""
        await self.flush()
        try:
            return await asyncio.to_thread(self._views.sync) >= seq
        except sqlite3.Error:
            return False

    def _queue_changes(self) -> None:
        changed, self._changed = self._changed & self._state.runs.keys(), set()
        for name in changed:
            if self._is_too_soon(name):
                self._changed.add(name)
                continue
            view = self._run_or_none(name)
            if view is not None:
                self._views.put_run(view)
            if view is not None and view.tensorboard:
                self._event_files.record_view(view, usual_step_s(self._live.run(name)), self._live.clock.now())
            if self._state.runs[name].has_ended:
                self._logs.close(name)
        self._queue_agents()

    def _is_too_soon(self, name: str) -> bool:
        """Return whether to show a run later: the view of a large run is expensive."""
        run, now = self._state.runs[name], self._live.clock.now()
        pause_s = SHOW_S_PER_MEMBER * len(run.membership.members)
        if not run.has_ended and now - self._shown_at.get(name, 0.0) < pause_s:
            return True
        self._shown_at[name] = now
        return False

    def _queue_agents(self) -> None:
        """Queue the agents whose views changed; their load and silence change always and are not stored."""
        if self._state.fleet is self._shown_fleet:
            return
        self._shown_fleet = self._state.fleet
        for view in self.agents():
            lasting = structs.replace(view, heartbeat_age_s=0.0, load=0.0)
            if self._shown_agents.get(view.agent) != lasting:
                self._shown_agents[view.agent] = lasting
                self._views.put_agent(view)

    async def stop(self, tasks: Collection[asyncio.Task[None]]) -> None:
        """Cancel tasks such as `write_forever`, but not during a write, which its thread would continue alone."""
        async with self._flushing:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Store the last views and close the files."""
        # Machines cost until they are released, which is after the end of their run.
        self._changed.update(self._state.provisioning.account.runs)
        self._shown_at.clear()
        self._queue_changes()
        self._event_files.close()
        self._views.close()
