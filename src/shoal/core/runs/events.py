"""What happens to a run as a whole, beyond its membership and its processes; journaled like all events."""

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
    """A run was submitted, by a named user or by who owns the coordinator. `settings` are checked and complete."""

    spec: RunSpec
    settings: dict[str, Value]
    user: str = ""


@dataclass(frozen=True, slots=True)
class RunResumed:
    """A run that had ended is set going again, from its newest checkpoint."""

    min_members: int
    max_members: int


@dataclass(frozen=True, slots=True)
class BudgetSet:
    """What a run may spend in all was changed."""

    budget: float


@dataclass(frozen=True, slots=True)
class UserStopRequested:
    """Somebody asked the run to stop; `status` is what it ends as."""

    reason: str
    checkpoint: bool
    grace_s: float
    status: str = "stopped"


@dataclass(frozen=True, slots=True)
class ExceptionReported:
    """The user's code raised in a member."""

    member: str
    kind: str
    text: str
    traceback: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class MachineReported:
    """What an agent said of its machine."""

    agent: str
    machine: MachineInfo
    pid: int


@dataclass(frozen=True, slots=True)
class ProgressMeasured:
    """How the training went lately, now and then; `idle` is as in a beat."""

    step: int
    epoch: int
    total_steps: int | None
    loss: float | None
    samples_per_s: float
    metrics: dict[str, float]
    batch: int = 0
    noise: float | None = None
    idle: tuple[float | None, float] | None = None


RunEvent = Union[
    RunCreated,
    RunResumed,
    BudgetSet,
    UserStopRequested,
    ExceptionReported,
    MachineReported,
    ProgressMeasured,
    EvaluationReported,
]

KINDS: dict[str, type] = {
    kind.__name__: kind
    for union in (events.Event, fleet_events.Event, provisioning_events.Event, RunEvent)
    for kind in union.__args__  # type: ignore[attr-defined]
}
