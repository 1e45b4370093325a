"""What can happen to the membership of a run, and what can be asked in answer.

Events are journaled before they are acted on; instructions are carried out by the coordinator's shell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from shoal.core.placement import Placement
from shoal.core.world import Address, World

# --- events


@dataclass(frozen=True, slots=True)
class MemberConnected:
    """A member connected, for the first time or again (same incarnation); for `done` and `early` see MemberDone."""

    member: str
    incarnation: str
    address: Address
    world: int | None = None
    step: int | None = None
    broken: bool = False
    done: bool = False
    role: str = "trainer"
    early: bool = False


@dataclass(frozen=True, slots=True)
class MemberReady:
    """A member can be admitted. `restored`: it was asked for a checkpoint; `step` is None if there was none."""

    member: str
    fingerprint: str
    step: int | None
    restored: bool = False
    speed: float = 0.0


@dataclass(frozen=True, slots=True)
class WorldBroken:
    """A member's exchange failed; it holds the state of `step`, None for none."""

    member: str
    world: int
    step: int | None
    suspects: tuple[str, ...] = ()
    cause: str = ""


@dataclass(frozen=True, slots=True)
class WorldEntered:
    """A member crossed into a proposed world at a step boundary."""

    member: str
    world: int
    step: int


@dataclass(frozen=True, slots=True)
class WorldPrepareFailed:
    member: str
    world: int
    suspects: tuple[str, ...] = ()
    cause: str = ""


@dataclass(frozen=True, slots=True)
class PartCopied:
    """A primary has given its learner all that it has; `since` says which learner."""

    member: str
    part: int
    to: str
    since: int


@dataclass(frozen=True, slots=True)
class PartReleased:
    """A primary has come to rest, so that its backup can take over; `number` is the placement that asked for it."""

    member: str
    part: int
    number: int


@dataclass(frozen=True, slots=True)
class ServerUnreachable:
    """A member cannot reach a server of this placement."""

    member: str
    server: str
    number: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class MemberDisconnected:
    member: str


@dataclass(frozen=True, slots=True)
class MemberLost:
    """A member is gone: its process ended, its lease ran out, or it is `stuck`.

    The process of one that is stuck answers, but what its script does will not come to an end.
    """

    member: str
    reason: str
    hung: bool = False


@dataclass(frozen=True, slots=True)
class NoticeReceived:
    """A member will go away within so many seconds."""

    member: str
    within_s: float
    cause: str


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """A member is gone as it said; `world` is the one that the others crossed into without it."""

    member: str
    step: int | None
    world: int | None = None


@dataclass(frozen=True, slots=True)
class MemberDone:
    """`early` says that its script did not wait for the last step, which others may still come to."""

    member: str
    step: int
    early: bool = False


@dataclass(frozen=True, slots=True)
class ClaimRequested:
    member: str
    name: str


@dataclass(frozen=True, slots=True)
class ClaimCompleted:
    member: str
    name: str


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    member: str
    step: int
    path: str


@dataclass(frozen=True, slots=True)
class AdjustmentReported:
    """The members of a world changed something by themselves, from `step` on; one of them tells.

    `what` is shares, batch or memory; `values` are its figures by name.
    """

    member: str
    step: int
    what: str
    values: dict[str, int]
    reason: str


@dataclass(frozen=True, slots=True)
class ProgressRecorded:
    """The run has committed up to here; written now and then, not at every step."""

    step: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """`until_replaced` says that it is for lack of members only, and that the run goes on when others are there."""

    reason: str
    checkpoint: bool
    exit_code: int
    until_replaced: bool = False


@dataclass(frozen=True, slots=True)
class ScaleRequested:
    min_members: int
    max_members: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A wait is over: gathering members, a bench, or a proposal that nobody has crossed into yet."""

    what: str


@dataclass(frozen=True, slots=True)
class CoordinatorRestarted:
    """All connections are gone, and every lease starts anew."""


Event = Union[
    MemberConnected,
    MemberReady,
    WorldBroken,
    WorldEntered,
    WorldPrepareFailed,
    PartCopied,
    PartReleased,
    ServerUnreachable,
    MemberDisconnected,
    MemberLost,
    NoticeReceived,
    MemberLeft,
    MemberDone,
    ClaimRequested,
    ClaimCompleted,
    CheckpointWritten,
    AdjustmentReported,
    ProgressRecorded,
    StopRequested,
    ScaleRequested,
    TimerFired,
    CoordinatorRestarted,
]

# --- instructions


@dataclass(frozen=True, slots=True)
class FormWorld:
    """Tell these members to enter the world now."""

    world: World
    to: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ProposeWorld:
    """Tell these members to connect the world in the background."""

    after: int
    world: World
    to: tuple[str, ...]
    reason: str
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class DissolveWorld:
    number: int
    to: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class PublishPlacement:
    """Tell these members who holds the parts of the state from now on."""

    placement: Placement
    to: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class AnnounceTrainerLost:
    """Tell these servers that a trainer is gone, so that nobody waits for it."""

    to: tuple[str, ...]
    member: str
    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class RestoreCheckpoint:
    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class RejectMember:
    """End the connection of this incarnation with an error."""

    member: str
    incarnation: str
    code: str
    what: str
    why: str = ""
    do: str = ""


@dataclass(frozen=True, slots=True)
class EvictMember:
    """Tell a member that it is no longer in the run, and may say hello anew."""

    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopMembers:
    to: tuple[str, ...]
    reason: str
    checkpoint: bool
    exit_code: int


@dataclass(frozen=True, slots=True)
class AnnounceFinished:
    to: tuple[str, ...]
    step: int


@dataclass(frozen=True, slots=True)
class GrantClaim:
    member: str
    name: str


@dataclass(frozen=True, slots=True)
class AnnounceClaimCompleted:
    to: tuple[str, ...]
    name: str


@dataclass(frozen=True, slots=True)
class MembershipNote:
    """A sentence for the story; nothing to carry out."""

    text: str
    member: str = ""


Instruction = Union[
    FormWorld,
    ProposeWorld,
    DissolveWorld,
    PublishPlacement,
    AnnounceTrainerLost,
    RestoreCheckpoint,
    RejectMember,
    EvictMember,
    StopMembers,
    AnnounceFinished,
    GrantClaim,
    AnnounceClaimCompleted,
    MembershipNote,
]
