"""What the coordinator's HTTP API answers, and what it takes. JSON; unknown fields are refused on the way in."""

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
    """One member as the coordinator knows it.

    `status` is starting, waiting, spare, training, serving, evaluating, recovering, leaving or done. The seconds
    are those of a usual step: reading data, computing, waiting for the slowest member, exchanging. With servers,
    `clock` is how many tickets it has finished, `ahead` how many more than the slowest, and `waits_for` whom it waits
    for.
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
    beat_age_s: float
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
    """What members changed by themselves: `what` is shares, batch or memory, `values` are its figures by name."""

    what: str
    step: int
    values: dict[str, int]
    reason: str


class EvaluationView(msgspec.Struct, frozen=True):
    """How the evaluation of a run's checkpoints stands; `without` is how many evaluations came after the best."""

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
    """Machine seconds, what they cost, and what was saved against the price of machines that are not preempted.

    `unused` is the part that was spent on machines while they started or went, `lost` how many were lost.
    """

    machine_s: float
    spent: float
    saved: float
    unused: float = 0.0
    lost: int = 0


class PoolView(msgspec.Struct, frozen=True):
    """A pool of a coordinator: how many of its machines are here, and how many were asked for and are not.

    `leaving` are those that were told to go, and are paid for until they are gone.
    `trouble` is why nothing more is asked of it, empty if something would be; `until` is when it is asked again.
    """

    pool: str
    engine: str
    limit: int
    slots: int
    price_per_h: float
    here: int
    waiting: int
    trouble: str = ""
    until: float | None = None
    cost: CostView = CostView(0.0, 0.0, 0.0)
    labels: dict[str, str] = {}
    leaving: int = 0


class RunView(msgspec.Struct, frozen=True):
    """A run now. `status` is starting, training, waiting, stopping, done, failed, stopped or resumable.

    `noise` is the gradient noise scale in samples; `idle_before` and `idle_now` are the parts of the members' time that
    are waited away with equal shares and with those in force; `decided` is the latest decision of each kind;
    `tensorboard` is where event files are written, and `tensorboard_error` why they are not; `cost` is that of the
    machines that were hired for it, `costs` the same by pool, `rate_per_h` what an hour of them costs now, and `budget`
    what they may cost in all; `user` is who submitted it, empty for the owner of the coordinator; `problem` is what
    kept it from beginning. `queued` is its place among the runs that wait for machines, 0 if it does not; `waits_for`
    is what it waits for; `cwd` is the directory that it was started in, on the machine of who did.
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
    """A machine; `via` is the URL at which its agent reached the coordinator."""

    agent: str
    machine: str
    cores: int
    memory_bytes: int
    devices: tuple[str, ...]
    slots: int | None
    members: tuple[str, ...]
    connected: bool
    beat_age_s: float
    load: float
    notice: str
    pool: str = ""
    via: str = ""


class LogPage(msgspec.Struct, frozen=True):
    """Lines are (member, text), oldest first; ask again with `after=next`."""

    lines: tuple[tuple[str, str], ...]
    next: int


class FileView(msgspec.Struct, frozen=True):
    """A file that a run has at its coordinator; `name` is below one of its folders, `modified` is in seconds."""

    name: str
    size_bytes: int
    modified: float


class FilePage(msgspec.Struct, frozen=True):
    """The files of one folder of a run, by name, and how much more the coordinator can take."""

    files: tuple[FileView, ...]
    free_bytes: int


class StopRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reason: str = "asked by the user"
    checkpoint: bool = True
    grace_s: float = 30.0


class ScaleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many members from now on, and what they may cost in all if that changes too."""

    min: int
    max: int
    budget: float | None = None


class SetupReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a hired machine does before its agent is there, or why it failed; `final` if all others would, too."""

    why: str
    failed: bool = False
    where: str = ""
    do: str = ""
    final: bool = False


class ErrorView(msgspec.Struct, frozen=True):
    """An error as the API answers it."""

    code: str
    what: str
    where: str = ""
    why: str = ""
    do: str = ""


class Health(msgspec.Struct, frozen=True):
    shoal: str
    protocol: int
    coordinator: str
