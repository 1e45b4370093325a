"""Request and response bodies of the coordinator's HTTP API, as JSON.

Requests are strict: unknown fields are rejected, so that a misspelt option is an error and not ignored. Views are what
the coordinator answers; clients ignore fields that they do not know. Times are epoch seconds, costs are in the currency
of the pools' prices. `docs/reference/http.md` lists the paths.
"""

from __future__ import annotations

import msgspec

from shoal.core.runs.spec import RoleSpec as RoleSpec
from shoal.core.runs.spec import RunSpec as RunSpec
from shoal.core.runs.spec import StoryLine as StoryLine


class SubmitRole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `RoleSpec` as a client sends it."""

    count: int = 1
    cpus: int = 0
    memory_bytes: int = 0
    on: tuple[str, ...] = ()
    where: dict[str, str] = {}


class SubmitRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `RunSpec` as a client sends it."""

    name: str
    argv: tuple[str, ...]
    cwd: str
    members: tuple[int, int]
    env: dict[str, str] = {}
    module: bool = False
    settings: dict[str, str | int | float | bool] = {}
    compat: str = ""
    resume: bool = False
    roles: dict[str, SubmitRole] = {}
    on: tuple[str, ...] = ()
    project: str = ""
    priority: int = 0
    where: dict[str, str] = {}
    budget: float | None = None

    def spec(self) -> RunSpec:
        """Return the run that the client describes."""
        return msgspec.convert(self, RunSpec, from_attributes=True)


class MemberView(msgspec.Struct, frozen=True):
    """One member, as the coordinator knows it.

    `status` is starting, waiting, spare, training, serving, evaluating, recovering, leaving or done. The last four
    fields are the seconds of a typical step: reading data, computing, waiting for the slowest member, exchanging. With
    servers, `clock` counts its finished tickets, `ahead` is its lead over the slowest trainer, and `waits_for` names
    the members that it waits for.
    """

    member: str
    incarnation: str
    status: str
    rank: int | None
    agent: str
    pid: int
    host: str
    step: int | None
    share: int
    phase: str
    phase_age_s: float
    heartbeat_age_s: float
    samples_per_s: float
    connected: bool
    role: str = "trainer"
    clock: int = 0
    ahead: int = 0
    waits_for: tuple[str, ...] = ()
    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    exchange_s: float = 0.0


class AdjustmentView(msgspec.Struct, frozen=True):
    """A change that members made by themselves: `what` is shares, batch or memory, `values` the new figures."""

    what: str
    step: int
    values: dict[str, int]
    reason: str


class EvaluationView(msgspec.Struct, frozen=True):
    """State of the evaluation of a run's checkpoints; `without` counts the evaluations since the best one."""

    step: int
    metrics: dict[str, float]
    at: float
    evaluations: int
    best: str = ""
    best_step: int | None = None
    best_value: float | None = None
    without: int = 0
    patience: int | None = None
    export: str = ""


class CostView(msgspec.Struct, frozen=True):
    """Machine seconds, their cost, and what was saved compared with the price of machines that are never preempted.

    `unused` is the cost of machines while they started or stopped; `lost` is how many were lost.
    """

    machine_s: float
    spent: float
    saved: float
    unused: float = 0.0
    lost: int = 0


class PoolView(msgspec.Struct, frozen=True):
    """A pool of a coordinator: how many of its machines are running, and how many were requested and are awaited.

    `leaving` counts machines that are being released and are paid for until they are gone. `trouble` says why no
    machine is requested from it now, empty if one would be; `until` is when it is tried again.
    """

    pool: str
    engine: str
    limit: int
    slots: int
    price_per_h: float
    running: int
    waiting: int
    trouble: str = ""
    until: float | None = None
    cost: CostView = CostView(0.0, 0.0, 0.0)
    labels: dict[str, str] = {}
    leaving: int = 0


class RunView(msgspec.Struct, frozen=True):
    """A run at this moment.

    `status` is starting, training, waiting, stopping, done, failed, stopped or resumable; `problem` is the error that
    kept it from starting. `queued` is its position among the runs that wait for machines, 0 if it does not wait;
    `waits_for` says what it waits for. `user` submitted it, empty for the owner of the coordinator; `cwd` is the
    directory on the submitter's machine.

    `noise` is the gradient noise scale in samples. `idle_before` and `idle_now` are the fractions of the members' time
    spent waiting, with equal shares and with the present ones. `decided` has the latest adjustment of each kind.
    `tensorboard` is the folder of the event files, and `tensorboard_error` why they cannot be written.

    `cost` is that of the machines allocated for it, `costs` the same by pool, `rate_per_h` the present cost of an hour,
    and `budget` the limit of the total, None for no limit.
    """

    run: str
    name: str
    status: str
    reason: str
    since: float
    started: float
    ended: float | None
    exit_code: int | None
    argv: tuple[str, ...]
    members_min: int
    members_max: int
    world: int | None
    world_size: int
    step: int
    total_steps: int | None
    epoch: int
    loss: float | None
    samples_per_s: float
    metrics: dict[str, float]
    members: tuple[MemberView, ...]
    losses: int
    joins: int
    last_change: str
    checkpoint_step: int | None
    checkpoint_path: str
    directory: str
    batch: int = 0
    noise: float | None = None
    idle_before: float | None = None
    idle_now: float | None = None
    decided: tuple[AdjustmentView, ...] = ()
    evaluation: EvaluationView | None = None
    tensorboard: str = ""
    tensorboard_error: str = ""
    cost: CostView | None = None
    user: str = ""
    problem: ErrorView | None = None
    costs: dict[str, CostView] = {}
    rate_per_h: float = 0.0
    budget: float | None = None
    priority: int = 0
    queued: int = 0
    waits_for: str = ""
    cwd: str = ""
    settings: dict[str, str | int | float | bool] = {}


class AgentView(msgspec.Struct, frozen=True):
    """A machine with an agent; `via` is the URL through which the agent reached the coordinator."""

    agent: str
    machine: str
    cores: int
    memory_bytes: int
    devices: tuple[str, ...]
    slots: int | None
    members: tuple[str, ...]
    connected: bool
    heartbeat_age_s: float
    load: float
    notice: str
    pool: str = ""
    via: str = ""


class LogPage(msgspec.Struct, frozen=True):
    """Log lines as (member, text), oldest first; request the following ones with `after=next`."""

    lines: tuple[tuple[str, str], ...]
    next: int


class FileView(msgspec.Struct, frozen=True):
    """A file of a run at its coordinator; `name` is relative to one of the run's folders."""

    name: str
    size_bytes: int
    modified: float


class FilePage(msgspec.Struct, frozen=True):
    """The files of one folder of a run, by name, and how many bytes the coordinator can still store."""

    files: tuple[FileView, ...]
    free_bytes: int


class StopRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to stop a run; members get `grace_s` seconds before they are killed."""

    reason: str = "requested by the user"
    checkpoint: bool = True
    grace_s: float = 30.0


class ScaleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """New minimum and maximum number of members, and the new budget if that changes too."""

    min: int
    max: int
    budget: float | None = None


class SetupReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Progress or failure of a machine that prepares its environment, before its agent connects.

    `final` says that every other machine of the pool would fail in the same way.
    """

    why: str
    failed: bool = False
    where: str = ""
    do: str = ""
    final: bool = False


class ErrorView(msgspec.Struct, frozen=True):
    """The fields of a ShoalError."""

    code: str
    what: str
    where: str = ""
    why: str = ""
    do: str = ""


class Health(msgspec.Struct, frozen=True):
    """Version, protocol number and name of a coordinator; needs no token."""

    shoal: str
    protocol: int
    coordinator: str
