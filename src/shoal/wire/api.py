"""Request and response bodies of the coordinator's HTTP API, as JSON.

Requests are strict: unknown fields are rejected, so that a misspelt option is an error and not ignored. Views are what
the coordinator answers; clients ignore fields that they do not know. Times are epoch seconds, costs are in the currency
of the pools' prices. `docs/reference/http.md` lists the paths.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.core.runs.spec import RoleSpec as RoleSpec
from shoal.core.runs.spec import RunSpec as RunSpec
from shoal.core.runs.spec import StoryLine as StoryLine
from shoal.wire.limits import (
    MAX_FILES,
    MAX_ITEMS,
    MAX_NAME,
    Amount,
    Bytes,
    Count,
    Digest,
    EpochSeconds,
    Integer,
    Labels,
    Measurement,
    Metrics,
    Name,
    Names,
    Real,
    Seconds,
    SettingValues,
    Text,
    Texts,
)


class SubmitRole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `RoleSpec` as a client sends it."""

    count: Count = 1
    cpus: Count = 0
    memory_bytes: Bytes = 0
    on: Names = ()
    where: Labels = {}


class SubmitRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `RunSpec` as a client sends it."""

    name: Name
    argv: Texts
    cwd: Text
    members: tuple[Integer, Integer]
    env: Labels = {}
    module: bool = False
    settings: SettingValues = {}
    compat: Name = ""
    resume: bool = False
    roles: Annotated[dict[Name, SubmitRole], Meta(max_length=MAX_NAME)] = {}
    on: Names = ()
    project: Digest = ""
    priority: Integer = 0
    where: Labels = {}
    budget: Real | None = None

    def spec(self) -> RunSpec:
        """Return the run that the client describes."""
        return msgspec.convert(self, RunSpec, from_attributes=True)


class MemberView(msgspec.Struct, frozen=True):
    """One member, as the coordinator knows it.

    `status` is starting, waiting, spare, training, serving, evaluating, recovering, evicted (silent, and replaced
    unless it answers), rejoining, leaving or done. The last four fields are the seconds of a typical step: reading
    data, computing, waiting for the slowest member, exchanging. With servers, `clock` counts its finished tickets,
    `ahead` is its lead over the slowest trainer, and `waits_for` names the members that it waits for.
    """

    member: Name
    incarnation: Name
    status: Name
    rank: Count | None
    agent: Name
    pid: Count
    host: Name
    step: Count | None
    share: Count
    phase: Name
    phase_age_s: Real
    heartbeat_age_s: Real
    samples_per_s: Real
    connected: bool
    role: Name = "trainer"
    clock: Count = 0
    ahead: Integer = 0
    waits_for: Names = ()
    data_s: Real = 0.0
    compute_s: Real = 0.0
    wait_s: Real = 0.0
    exchange_s: Real = 0.0


class AdjustmentView(msgspec.Struct, frozen=True):
    """A change that members made by themselves: `what` is shares, batch or memory, `values` the new figures."""

    what: Name
    step: Count
    values: Annotated[dict[Name, Integer], Meta(max_length=MAX_ITEMS)]
    reason: Text


class EvaluationView(msgspec.Struct, frozen=True):
    """State of the evaluation of a run's checkpoints; `without` counts the evaluations since the best one."""

    step: Count
    metrics: Metrics
    at: EpochSeconds
    evaluations: Count
    best: Text = ""
    best_step: Count | None = None
    best_value: Real | None = None
    without: Count = 0
    patience: Count | None = None
    export: Text = ""


class ForecastView(msgspec.Struct, frozen=True):
    """The seconds until the last step and the interval in which they lie with probability `coverage`.

    If they cannot be foretold, `seconds` is None and `unknown` says why. `source` says what the figures come from, and
    `changed` why they differ from those before the last change of world.
    """

    seconds: Amount | None = None
    low_s: Amount = 0.0
    high_s: Amount = 0.0
    coverage: Real = 0.0
    source: Text = ""
    unknown: Text = ""
    changed: Text = ""


class CostView(msgspec.Struct, frozen=True):
    """Machine seconds, their cost, and what was saved compared with the price of machines that are never preempted.

    `unused` is the cost of machines while they started or stopped; `lost` is how many were lost.
    """

    machine_s: Real
    spent: Real
    saved: Real
    unused: Real = 0.0
    lost: Count = 0


class PoolView(msgspec.Struct, frozen=True):
    """A pool of a coordinator: how many of its machines are running, and how many were requested and are awaited.

    `leaving` counts machines that are being released and are paid for until they are gone. `trouble` says why no
    machine is requested from it now, empty if one would be; `until` is when it is tried again.
    """

    pool: Name
    engine: Name
    limit: Count
    slots: Count
    price_per_h: Real
    running: Count
    waiting: Count
    trouble: Text = ""
    until: EpochSeconds | None = None
    cost: CostView = CostView(0.0, 0.0, 0.0)
    labels: Labels = {}
    leaving: Count = 0


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

    `uncopied` names the parts of a state on servers that only one server has. `forecast` is the time left.
    """

    run: Name
    name: Name
    status: Name
    reason: Text
    since: EpochSeconds
    started: EpochSeconds
    ended: EpochSeconds | None
    exit_code: Integer | None
    argv: Texts
    members_min: Count
    members_max: Count
    world: Count | None
    world_size: Count
    step: Count
    total_steps: Count | None
    epoch: Count
    loss: Measurement | None
    samples_per_s: Real
    metrics: Metrics
    members: Annotated[tuple[MemberView, ...], Meta(max_length=MAX_ITEMS)]
    losses: Count
    joins: Count
    last_change: Text
    checkpoint_step: Count | None
    checkpoint_path: Text
    directory: Text
    batch: Count = 0
    noise: Real | None = None
    idle_before: Real | None = None
    idle_now: Real | None = None
    decided: Annotated[tuple[AdjustmentView, ...], Meta(max_length=MAX_NAME)] = ()
    evaluation: EvaluationView | None = None
    tensorboard: Text = ""
    tensorboard_error: Text = ""
    cost: CostView | None = None
    user: Name = ""
    problem: ErrorView | None = None
    costs: Annotated[dict[Name, CostView], Meta(max_length=MAX_ITEMS)] = {}
    rate_per_h: Real = 0.0
    budget: Real | None = None
    priority: Integer = 0
    queued: Count = 0
    waits_for: Text = ""
    cwd: Text = ""
    settings: SettingValues = {}
    uncopied: Text = ""
    forecast: ForecastView | None = None


class AgentView(msgspec.Struct, frozen=True):
    """A machine with an agent; `via` is the URL through which the agent reached the coordinator."""

    agent: Name
    machine: Name
    cores: Count
    memory_bytes: Bytes
    devices: Names
    slots: Count | None
    members: Names
    connected: bool
    heartbeat_age_s: Real
    load: Real
    notice: Text
    pool: Name = ""
    via: Text = ""


class LogPage(msgspec.Struct, frozen=True):
    """Log lines as (member, text), oldest first; request the following ones with `after=next`."""

    lines: Annotated[tuple[tuple[Name, Text], ...], Meta(max_length=MAX_ITEMS)]
    next: Count


class FileView(msgspec.Struct, frozen=True):
    """A file of a run at its coordinator; `name` is relative to one of the run's folders."""

    name: Text
    size_bytes: Bytes
    modified: EpochSeconds


class FilePage(msgspec.Struct, frozen=True):
    """The files of one folder of a run, by name, and how many bytes the coordinator can still store."""

    files: Annotated[tuple[FileView, ...], Meta(max_length=MAX_FILES)]
    free_bytes: Bytes


class StopRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to stop a run; members get `grace_s` seconds before they are killed."""

    reason: Text = "requested by the user"
    checkpoint: bool = True
    grace_s: Seconds = 30.0


class ScaleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """New minimum and maximum number of members, and the new budget if that changes too."""

    min: Integer
    max: Integer
    budget: Real | None = None


class SetupReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Progress or failure of a machine that prepares its environment, before its agent connects.

    `final` says that every other machine of the pool would fail in the same way.
    """

    why: Text
    failed: bool = False
    where: Text = ""
    do: Text = ""
    final: bool = False


class ErrorView(msgspec.Struct, frozen=True):
    """The fields of a ShoalError."""

    code: Name
    what: Text
    where: Text = ""
    why: Text = ""
    do: Text = ""


class Health(msgspec.Struct, frozen=True):
    """Version, protocol number and name of a coordinator; needs no token."""

    shoal: Text
    protocol: Count
    coordinator: Name
