"""Live state: what the coordinator knows but does not journal, such as connections and the latest heartbeats.

It is lost with the process. Members and agents connect again and report, so nothing depends on keeping it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from shoal.coordinator.connections import AgentConnection, Connection, MemberConnection
from shoal.core.forecast.time_left import ProgressForecast
from shoal.core.membership import decide as mb
from shoal.core.membership.leases import CoordinatorReachability
from shoal.core.membership.state import TRAINER
from shoal.core.runs.events import ProgressMeasured
from shoal.core.runs.state import RunState
from shoal.wire.api import RunView
from shoal.wire.member_messages import HeartbeatMsg


class MonotonicWallClock:
    """Wall-clock time that never jumps: read once, then advanced by the monotonic clock."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._start = max(time.time(), not_before)
        self._started_at = time.monotonic()

    def now(self) -> float:
        """Return the time in seconds since the epoch."""
        return self._start + time.monotonic() - self._started_at


class LiveRun:
    """Connections of a run's members, their leases and latest heartbeats, and the last measured progress.

    `unrecorded_step` is a measured step that is not in the journal yet, 0 for none.
    """

    __slots__ = (
        *("connections", "forecast", "heartbeats", "leases", "measured_at", "progress", "reachability"),
        *("step_recorded_at", "unrecorded_step"),
    )

    def __init__(self) -> None:
        self.connections: dict[str, MemberConnection] = {}
        self.leases: dict[str, mb.LastHeartbeat] = {}
        self.heartbeats: dict[str, HeartbeatMsg] = {}
        self.reachability: CoordinatorReachability | None = None
        self.progress: ProgressMeasured | None = None
        self.forecast = ProgressForecast()
        self.measured_at = 0.0
        self.unrecorded_step = 0
        self.step_recorded_at = 0.0


class LiveState:
    """Connections of agents and the live state of every run; `heard_at` is when anything was last received."""

    def __init__(self, clock: MonotonicWallClock) -> None:
        self.clock = clock
        self.agents: dict[str, AgentConnection] = {}
        self.heard_at = clock.now()
        self._runs: dict[str, LiveRun] = {}

    def run(self, name: str) -> LiveRun:
        return self._runs.setdefault(name, LiveRun())

    def runs(self) -> Iterable[LiveRun]:
        return self._runs.values()

    def received(self, connection: Connection) -> None:
        """Note that a message has arrived."""
        connection.heard_at = self.heard_at = self.clock.now()

    def closed(self, connection: Connection) -> None:
        """Note that a connection is closed; that the peer closed it shows that we can hear it."""
        if not connection.closed:
            self.heard_at = self.clock.now()
        connection.closed = True


def measure_progress(run: RunState, live: LiveRun) -> ProgressMeasured | None:
    """Return the progress of a run from the latest heartbeats of its trainers, None if none has made a step."""
    world, members = run.membership.world, run.membership.members
    names = [seat.member for seat in world.seats] if world is not None else []
    served = run.membership.placement is not None
    if served:
        names = [m.name for m in members.values() if m.role == TRAINER and m.status == mb.TRAINING]
    if run.membership.finished:
        names = [m.name for m in members.values() if m.role == TRAINER and m.status == mb.DONE]
    known = [live.heartbeats[name] for name in names if name in live.heartbeats]
    heartbeats = [heartbeat for heartbeat in known if heartbeat.step is not None]
    if not heartbeats:
        return None
    # Heartbeats are sent at different times: the member at the latest step has the latest figures.
    latest = max(heartbeats, key=lambda heartbeat: heartbeat.step or 0)
    with_loss = [heartbeat for heartbeat in heartbeats if heartbeat.loss is not None]
    loss = max(with_loss, key=lambda heartbeat: heartbeat.step or 0, default=latest).loss
    return ProgressMeasured(
        step=max(heartbeat.step or 0 for heartbeat in heartbeats),
        epoch=latest.epoch,
        total_steps=latest.total_steps,
        # JSON, and so the journal, has no NaN; the member itself says so with a code.
        loss=loss if loss is not None and math.isfinite(loss) else None,
        # Members of a world report the rate of the whole world, which they know from the step reports.
        samples_per_s=(sum if served else max)(heartbeat.samples_per_s for heartbeat in heartbeats),
        metrics=next((metrics for heartbeat in heartbeats if (metrics := _finite(heartbeat.metrics))), {}),
        batch=latest.batch,
        noise=latest.noise,
        idle=latest.idle,
    )


def trainers_of_servers(run: RunState) -> int:
    """Return how many members train in a run with parameter servers, which has no worlds."""
    if run.membership.placement is None:
        return 0
    return sum(m.role == TRAINER and m.status == mb.TRAINING for m in run.membership.members.values())


def progress_shown(view: RunView) -> ProgressMeasured:
    """Return the measurement that a view of a run shows."""
    idle = (view.idle_before, view.idle_now) if view.idle_now is not None else None
    return ProgressMeasured(
        *(view.step, view.epoch, view.total_steps, view.loss, view.samples_per_s, view.metrics),
        *(view.batch, view.noise, idle),
    )


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    """Return the finite metrics; JSON has no others."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def has_progressed(progress: ProgressMeasured, last: ProgressMeasured | None) -> bool:
    """Return whether a step was made or the script has reported other metrics."""
    return last is None or (progress.step, progress.metrics) != (last.step, last.metrics)


def usual_step_s(live: LiveRun) -> float:
    """Return the seconds of a usual step, 0 if no member has reported any."""
    return max((heartbeat.usual_step_s for heartbeat in live.heartbeats.values()), default=0.0)
