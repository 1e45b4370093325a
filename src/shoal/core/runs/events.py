"""Events of a run as a whole, and `KINDS`, the table of every event that a journal may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from shoal.core.fleet import events as fleet_events
from shoal.core.membership import events
from shoal.core.provisioning import events as provisioning_events
from shoal.core.runs.evaluation import EvaluationReported
from shoal.core.runs.spec import MachineInfo, RunSpec, Value


@dataclass(frozen=True, slots=True)
class RunCreated:
    """A run was submitted by `user`, "" for the coordinator's owner. `settings` are checked and complete."""

    spec: RunSpec
    settings: dict[str, Value]
    user: str = ""


@dataclass(frozen=True, slots=True)
class RunResumed:
    """An ended run was started again; it continues from its newest checkpoint."""

    min_members: int
    max_members: int


@dataclass(frozen=True, slots=True)
class BudgetSet:
    """The budget of a run, for all its machines together, was changed."""

    budget: float


@dataclass(frozen=True, slots=True)
class UserStopRequested:
    """A user asked the run to stop; `status` is its status afterwards."""

    reason: str
    checkpoint: bool
    grace_s: float
    status: str = "stopped"


@dataclass(frozen=True, slots=True)
class ExceptionReported:
    """A member's script raised an exception; `code` is set for errors of Shoal."""

    member: str
    kind: str
    text: str
    traceback: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class MachineReported:
    """An agent described its machine; `pid` is the agent's own."""

    agent: str
    machine: MachineInfo
    pid: int


@dataclass(frozen=True, slots=True)
class ProgressMeasured:
    """Progress of the training, measured about once a second; `idle` is as in a heartbeat.

    Only the last measurement of a run is journaled, when it has ended.
    """

    step: int
    epoch: int
    total_steps: int | None
    loss: float | None
    samples_per_s: float
    metrics: dict[str, float]
    batch: int = 0
    noise: float | None = None
    idle: tuple[float | None, float] | None = None


@dataclass(frozen=True, slots=True)
class EventSkipped:
    """An event that could not be read was stepped past at the request of the user; `text` is what its line held."""

    why: str
    text: str = ""


RunEvent = Union[
    RunCreated,
    RunResumed,
    BudgetSet,
    UserStopRequested,
    ExceptionReported,
    MachineReported,
    ProgressMeasured,
    EvaluationReported,
    EventSkipped,
]

KINDS: dict[str, type] = {
    kind.__name__: kind
    for union in (events.Event, fleet_events.Event, provisioning_events.Event, RunEvent)
    for kind in union.__args__  # type: ignore[attr-defined]
}
