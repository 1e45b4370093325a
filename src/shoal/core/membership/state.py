"""What is known of a run's members: the state that membership decides on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.core.membership import events as ev
from shoal.core.placement import Placement
from shoal.core.world import Address, World

STARTING, WAITING, TRAINING, REGROUPING, DONE = "starting", "waiting", "training", "regrouping", "done"
TRAINER, SERVER, EVALUATOR = "trainer", "server", "evaluator"


@dataclass(frozen=True, slots=True)
class MembershipSettings:
    """The settings that membership depends on. `hires` says that others are asked for when members have to go."""

    min_members: int = 1
    max_members: int = 1
    lease_s: float = 3.0
    reconnect_s: float = 1.0
    regroup_s: float = 0.5
    hang_timeout_s: float = 300.0
    quarantine_s: float = 1.0
    servers: int = 0
    replaces_members: bool = False


@dataclass(frozen=True, slots=True)
class MemberState:
    """What is known of one member. `step` is the state that it holds outside a world, None for none.

    One that is `leaving` trains on until `stop_by` if there is nobody yet to take over.
    """

    name: str
    incarnation: str
    address: Address
    status: str
    order: int
    since: float
    fingerprint: str = ""
    speed: float = 0.0
    step: int | None = None
    stale: bool = False
    connected: bool = True
    disconnected_since: float | None = None
    leaving: str = ""
    stop_by: float = 0.0
    suspected: bool = False
    failures: int = 0
    quarantined_until: float = 0.0
    rank: int = 1 << 30
    role: str = TRAINER


@dataclass(frozen=True, slots=True)
class ClaimState:
    """Something that exactly one member does."""

    holder: str
    waiting: tuple[str, ...] = ()
    completed: bool = False


@dataclass(frozen=True, slots=True)
class MembershipState:
    """The membership of one run. `done_at` is the last step, once somebody has done it.

    `gone` are the trainers that servers were told of lately: name, incarnation, when.
    """

    settings: MembershipSettings
    members: Mapping[str, MemberState] = field(default_factory=dict)
    world: World | None = None
    placement: Placement | None = None
    generation: int = 0
    lost_trainers: tuple[tuple[str, str, float], ...] = ()
    proposal: World | None = None
    repeat_at: float | None = None
    number: int = 0
    order: int = 0
    started: bool = False
    fingerprint: str = ""
    restoring: str = ""
    regroup_until: float | None = None
    claims: Mapping[str, ClaimState] = field(default_factory=dict)
    stopping: ev.StopRequested | None = None
    done_at: int | None = None
    finished: bool = False
    step: int = 0
    world_began_at: int = 0
    checkpoint_step: int | None = None
    checkpoint_path: str = ""
    adjustments: Mapping[str, ev.AdjustmentReported] = field(default_factory=dict)
    losses: int = 0
    joins: int = 0
    reason: str = "waiting for the first member"


@dataclass(frozen=True, slots=True)
class LastHeartbeat:
    """What a member last said of itself, and when."""

    at: float
    world: int | None = None
    step: int | None = None
    phase: str = ""
    phase_age_s: float = 0.0
    usual_step_s: float = 0.0
    waits_for: tuple[str, ...] = ()
