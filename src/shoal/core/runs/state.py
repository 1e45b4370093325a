"""State of a coordinator and of its runs. It is changed by `decide.apply` only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.core.fleet.requirements import SlotSize
from shoal.core.fleet.state import FleetState
from shoal.core.membership import leases
from shoal.core.membership.state import MembershipState
from shoal.core.provisioning.state import ProvisioningState
from shoal.core.runs.evaluation import EvaluationState
from shoal.core.runs.events import ExceptionReported, MachineReported
from shoal.core.runs.spec import Problem, RunSpec, Value

DONE = "done"
FAILED = "failed"
RESUMABLE = "resumable"


@dataclass(slots=True)
class RunState:
    """One run: its spec, its membership, and how it ended.

    `since` is when `reason` last changed. `status` is empty until the run has ended; `status_if_stopped` is what it
    becomes if the run ends before its training does. `failure` is the exception that is blamed for a failed run.
    """

    name: str
    spec: RunSpec
    settings: Mapping[str, Value]
    membership: MembershipState
    created: float
    since: float
    ended_at: float | None = None
    status: str = ""
    exit_code: int | None = None
    reason: str = ""
    status_if_stopped: str = RESUMABLE
    last_change: str = ""
    failure: ExceptionReported | None = None
    failed_at: float = 0.0
    evaluation: EvaluationState = field(default_factory=EvaluationState)
    user: str = ""
    stop_requested: bool = False
    problem: Problem | None = None
    budget: float | None = None

    @property
    def has_ended(self) -> bool:
        return self.ended_at is not None

    @property
    def tensorboard(self) -> bool:
        """Whether TensorBoard event files are written."""
        return bool(self.settings.get("tensorboard", True))

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats of a member."""
        settings = self.membership.settings
        return leases.heartbeat_s(float(self.settings.get("heartbeat_s", 0.5)), settings.max_members, settings.lease_s)

    @property
    def shown_status(self) -> str:
        """The status in one word, also of a run that has not ended."""
        if self.status:
            return self.status
        state = self.membership
        if state.stopping is not None:
            return "stopping"
        if state.world is not None or state.placement is not None or state.finished:
            return "training"
        return "waiting" if state.started else "starting"


@dataclass(slots=True)
class CoordinatorState:
    """The runs, processes and machines of one coordinator; `at` is the time of the last event."""

    runs: dict[str, RunState] = field(default_factory=dict)
    fleet: FleetState = field(default_factory=FleetState)
    provisioning: ProvisioningState = field(default_factory=ProvisioningState)
    machines: dict[str, MachineReported] = field(default_factory=dict)
    at: float = 0.0

    def projects(self) -> list[str]:
        """Return the hashes of projects that runs still need: active, queued and resumable ones."""
        return [run.spec.project for run in self.runs.values() if run.spec.project and run.status != DONE]

    def slot_size(self, agent: str) -> SlotSize | None:
        """Return the size that was requested for each slot of an agent, None if its pool does not support sizes."""
        allocation = self.provisioning.allocations.get(agent)
        pool = self.provisioning.pools.get(allocation.pool) if allocation is not None else None
        return (
            SlotSize(allocation.cpus, allocation.memory_bytes)
            if allocation is not None and pool is not None and pool.sized
            else None
        )
