"""Timers: everything the coordinator does because time has passed, such as expiring leases.

Leases are only as good as the coordinator's own hearing, so two corrections come before them. If this process did not
run for a while (stopped, swapped out, a suspended machine), heartbeats are waiting in its sockets: all leases are
extended by that time, and nothing expires for another half second. Members that are still to return after a restart
could not do so meanwhile: they get a full lease. And if nothing at all was received, neither from
members nor from agents, most likely the coordinator itself was cut off; `CoordinatorReachability` then restarts leases.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from shoal.coordinator.service import CoordinatorService
from shoal.core.fleet import decide as fl
from shoal.core.membership import decide as mb
from shoal.core.membership import events as ev
from shoal.core.membership import leases
from shoal.core.provisioning.events import CoordinatorWasDown
from shoal.core.runs import evaluation
from shoal.core.runs.state import RunState

log = logging.getLogger("shoal.coordinator")

TICK_S = 0.05
OVERSLEPT_S = 1.0
LISTEN_AGAIN_S = 0.5
REPEAT_TIMER_S = 1.0


class Timers:
    """Expires leases, fires due timers and runs the registered actions, on every tick."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service
        self._actions: list[Callable[[float], None]] = []
        self._ticked_at = service.clock.now()
        self._paused_until = 0.0
        self._fired_at: dict[tuple[str, str], float] = {}

    def every_tick(self, action: Callable[[float], None]) -> None:
        """Call an action with the time on every tick."""
        self._actions.append(action)

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Handle every expired timer."""
        service = self._service
        if service.is_blocked and service.retry() is not None:
            return
        now = service.clock.now()
        self._extend_leases_after_sleep(now)
        if now < self._paused_until:
            return
        for run in list(service.state.runs.values()):
            if not run.has_ended and not run.spec.compat:
                for event in self._due(run, now):
                    service.attempt(partial(service.handle, run.name, event))
        for expired in fl.due(service.state.fleet, now):
            service.attempt(partial(service.handle, expired.run, expired))
        for action in self._actions:
            action(now)

    def _due(self, run: RunState, now: float) -> list[ev.Event]:
        heartbeats = self._service.live.run(run.name).leases
        due = mb.due(run.membership, heartbeats, now, self._reachability(run, now))
        events = [*due, *evaluation.due(run.evaluation, heartbeats, now)]
        return [event for event in events if self._may_fire(run.name, event, now)]

    def _may_fire(self, run: str, event: ev.Event, now: float) -> bool:
        """Return whether to journal an event: a timer that changes nothing would be due again at every tick."""
        if not isinstance(event, ev.TimerFired):
            return True
        fired_at = self._fired_at.get((run, event.what))
        if fired_at is not None and now - fired_at < REPEAT_TIMER_S:
            return False
        self._fired_at[run, event.what] = now
        return True

    def _extend_leases_after_sleep(self, now: float) -> None:
        """Do not count against members the time in which this process did not run."""
        slept_s = now - self._ticked_at - TICK_S
        self._ticked_at = now
        if slept_s < OVERSLEPT_S:
            return
        self._paused_until = now + LISTEN_AGAIN_S
        for live in self._service.live.runs():
            for member, heartbeat in live.leases.items():
                live.leases[member] = replace(heartbeat, at=min(now, heartbeat.at + slept_s + LISTEN_AGAIN_S))
        for run in self._service.state.runs.values():
            live = self._service.live.run(run.name)
            if not run.has_ended and any(member not in live.leases for member in run.membership.members):
                live.reachability = replace(self._reachability(run, now), restored_at=now)
        for connection in self._service.live.agents.values():
            connection.heard_at = now
        machines = self._service.state.provisioning
        if machines.allocations or machines.demands:
            self._service.attempt(partial(self._service.handle, "", CoordinatorWasDown(slept_s)))

    def _reachability(self, run: RunState, now: float) -> leases.CoordinatorReachability:
        """Return whether this coordinator can be reached: silence of all members and agents is likely its own."""
        live = self._service.live.run(run.name)
        if live.reachability is None or not run.membership.members:
            silence_s = leases.silence_limit_s(run.heartbeat_s, run.membership.settings.lease_s)
            live.reachability = leases.CoordinatorReachability(now, silence_s)
        before, live.reachability = live.reachability, live.reachability.received(self._service.live.heard_at)
        if live.reachability.restored_at != before.restored_at:
            silent_s = live.reachability.last_received - before.last_received
            log.warning("received nothing for %.1f s: leases of run %s restart", silent_s, run.name)
        return live.reachability
