"""What the coordinator's HTTP API answers, and what it takes. JSON; unknown fields are refused on the way in."""

from __future__ import annotations

import msgspec


class RunSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to run. `argv` is the script and its arguments; `members` is (min, max)."""

    name: str
    argv: tuple[str, ...]
    cwd: str
    members: tuple[int, int]
    env: dict[str, str] = {}
    module: bool = False
    settings: dict[str, str | int | float | bool] = {}
    compat: str = ""
    resume: bool = False


class MemberView(msgspec.Struct, frozen=True):
    """One member as the coordinator knows it.

    `status` is starting, waiting, spare, training, serving, recovering, leaving or done.
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


class RunView(msgspec.Struct, frozen=True):
    """A run now. `status` is starting, training, waiting, stopping, done, failed, stopped or resumable."""

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


class AgentView(msgspec.Struct, frozen=True):
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


class StoryLine(msgspec.Struct, frozen=True):
    """One thing that happened, as a sentence with its reason."""

    seq: int
    at: float
    run: str
    kind: str
    member: str
    world: int | None
    step: int | None
    text: str
    reason: str


class LogPage(msgspec.Struct, frozen=True):
    """Lines are (member, text), oldest first; ask again with `after=next`."""

    lines: tuple[tuple[str, str], ...]
    next: int


class StopAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reason: str = "asked by the user"
    checkpoint: bool = True
    grace_s: float = 30.0


class ScaleAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    min: int
    max: int


class Problem(msgspec.Struct, frozen=True):
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
