"""State of a run's membership: its members, the live world, the proposed one, claims and progress."""

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
    """The settings that membership depends on.

    `regroup_s` is how long the first world waits for more than the minimum of members. `quarantine_s` is multiplied by
    a member's failures. `replaces_members` says that machines are requested when members have to leave, so that it is
    worth waiting for them.
    """

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
    """One member, as the coordinator knows it.

    `order` numbers members by their first connection. The lease counts from `since` or from the last heartbeat,
    whichever is later. `step` is the step of the state that the member holds outside a world, None if it holds none;
    that state is `stale` if the run has trained on without it. `leaving` is the cause of its notice, "" for none; a
    leaving member trains until `stop_by` if its replacement has not joined yet. A member with `failures` is not given a
    seat before `quarantined_until`. `rank` is its rank in the latest world, a huge number before the first.
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
    """The right of exactly one member to do something once, such as writing a file.

    `holder` is "" if the last one was lost and no other member waits for the claim.
    """

    holder: str
    waiting: tuple[str, ...] = ()
    completed: bool = False


@dataclass(frozen=True, slots=True)
class MembershipState:
    """The membership of one run.

    `number` is the number of the latest world or placement, `order` that of the latest member. A proposal is announced
    again at `repeat_at`. `restoring` is the member that was told to restore a checkpoint. The first world waits for
    more members until `regroup_until`. `done_at` is the last step, once a member has done it; `finished` is set when no
    member has to do it any more. `left_loop` names the member whose script left its loop there, before the last step of
    the data. `lost_from_world` are members that were lost from a world lately: how their processes ended is not known
    yet. `step` is the newest committed step that is known, `world_began_at` the first step of the live world.
    `failed_worlds` counts worlds in a row that broke before their first step; the next is not formed before `form_at`.
    `lost_trainers` are those that the servers were told of lately: name, incarnation, time.
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
    left_loop: str = ""
    lost_from_world: tuple[str, ...] = ()
    finished: bool = False
    step: int = 0
    world_began_at: int = 0
    failed_worlds: int = 0
    form_at: float | None = None
    checkpoint_step: int | None = None
    checkpoint_path: str = ""
    adjustments: Mapping[str, ev.AdjustmentReported] = field(default_factory=dict)
    losses: int = 0
    joins: int = 0
    reason: str = "waiting for the first member"


@dataclass(frozen=True, slots=True)
class LastHeartbeat:
    """A member's latest heartbeat and when it arrived.

    `phase` is what the member is doing since `phase_age_s`, `waits_for` the trainers that hold it up.
    """

    at: float
    world: int | None = None
    step: int | None = None
    phase: str = ""
    phase_age_s: float = 0.0
    usual_step_s: float = 0.0
    waits_for: tuple[str, ...] = ()
