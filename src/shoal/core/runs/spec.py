"""Descriptions that cross the coordinator's boundary: what to run, on what, what went wrong, what happened.

They are plain frozen dataclasses, so that core needs no serialisation library. The journal and the HTTP API encode them
as they are. Decoding a dataclass ignores unknown fields, so requests are first decoded into the strict structs of
`shoal.wire.api`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.core import validation

MAX_MEMORY_BYTES = 1 << 62

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """Processes of one role: how many, and what each needs of its machine; 0 means no requirement.

    The number of trainers and of servers is set by `RunSpec.members` and the setting `servers` instead. `on` are pools
    for this role alone and `where` labels that their machines must carry; without either, the role shares the machines
    of the trainers.
    """

    count: int = 1
    cpus: int = 0
    memory_bytes: int = 0
    on: tuple[str, ...] = ()
    where: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A run as it was submitted.

    `argv` is the script and its arguments, `members` is (min, max), `roles` are by name. `on` are the pools that may
    provide machines, in order of preference; without them, the run uses the connected agents. `where` are labels that
    the machines must carry. `project` is the hash of the uploaded project, for machines that cannot read `cwd`.
    Runs of higher `priority` get machines first. `budget` limits the total cost of machines; None means no limit.
    """

    name: str
    argv: tuple[str, ...]
    cwd: str
    members: tuple[int, int]
    env: dict[str, str] = field(default_factory=dict)
    module: bool = False
    settings: dict[str, Value] = field(default_factory=dict)
    compat: str = ""
    resume: bool = False
    roles: dict[str, RoleSpec] = field(default_factory=dict)
    on: tuple[str, ...] = ()
    project: str = ""
    priority: int = 0
    where: dict[str, str] = field(default_factory=dict)
    budget: float | None = None


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """A machine as its agent describes it."""

    name: str
    cores: int
    memory_bytes: int
    devices: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    python: str = ""
    platform: str = ""

    def __post_init__(self) -> None:
        validation.check_counts(self.cores)
        validation.check_counts(self.memory_bytes, most=MAX_MEMORY_BYTES)
        validation.check_length(self.devices, self.addresses, most=validation.MAX_NAME)
        validation.check_names(self.name, self.python, self.platform, *self.devices, *self.addresses)


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as a value, with the parts that every error of Shoal has."""

    code: str
    what: str
    where: str = ""
    why: str = ""
    do: str = ""


@dataclass(frozen=True, slots=True)
class StoryLine:
    """One line of `shoal why`: a sentence and its reason."""

    seq: int
    at: float
    run: str
    kind: str
    member: str
    world: int | None
    step: int | None
    text: str
    reason: str
