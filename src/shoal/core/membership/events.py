"""Events that change the membership of a run, and the instructions that follow from them.

The coordinator journals an event before it acts on it, and then carries out the instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from shoal.core.note_kinds import NoteKind
from shoal.core.placement import Placement
from shoal.core.world import Address, World

# --- events


@dataclass(frozen=True, slots=True)
class MemberConnected:
    """A member connected for the first time, or reconnected (same incarnation), and said where it is.

    `world` is the world that it is in, `broken` that it has left that world after a failed exchange. `step` is the step
    of the state that it holds. For `done` and `early` see MemberDone.
    """

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
    """A member has built its model and can be given a seat.

    `restored` answers RestoreCheckpoint; `step` is then None if no checkpoint could be read.
    """

    member: str
    fingerprint: str
    step: int | None
    restored: bool = False
    speed: float = 0.0


@dataclass(frozen=True, slots=True)
class WorldBroken:
    """A member's exchange failed. It holds the state of `step`, None for none, and suspects these peers."""

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
    """A member could not connect a proposed world."""

    member: str
    world: int
    suspects: tuple[str, ...] = ()
    cause: str = ""


@dataclass(frozen=True, slots=True)
class PartCopied:
    """A primary has sent its learner a complete copy; `since` identifies the learner (see PartAssignment)."""

    member: str
    part: int
    to: str
    since: int


@dataclass(frozen=True, slots=True)
class PartReleased:
    """A primary has stopped accepting updates, so that its backup can take over.

    `number` is the placement that asked for it.
    """

    member: str
    part: int
    number: int


@dataclass(frozen=True, slots=True)
class ServerUnreachable:
    """A member cannot reach a server of placement `number`."""

    member: str
    server: str
    number: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class MemberDisconnected:
    """A member's connection to the coordinator closed; its lease still runs."""

    member: str


@dataclass(frozen=True, slots=True)
class MemberLost:
    """A member is lost: its process ended, it was `silent` until its lease expired, or it is `hung`.

    The process of a hung member still sends heartbeats, but its script makes no progress.
    """

    member: str
    reason: str
    hung: bool = False
    silent: bool = False

    @property
    def note_kind(self) -> NoteKind:
        """Kind of the note about this loss: nothing is known of a silent process, it may hang as well."""
        return "MemberHung" if self.hung or self.silent else "MemberLost"


@dataclass(frozen=True, slots=True)
class NoticeReceived:
    """A member has to leave within `within_s` seconds."""

    member: str
    within_s: float
    cause: str


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """A member left as announced; `world` is the one that the others entered without it."""

    member: str
    step: int | None
    world: int | None = None


@dataclass(frozen=True, slots=True)
class MemberDone:
    """A member's training loop ended. `early`: its script left the loop before the last step, at which all end."""

    member: str
    step: int
    early: bool = False


@dataclass(frozen=True, slots=True)
class ClaimRequested:
    """A member asks for the right to do something that exactly one member does."""

    member: str
    name: str


@dataclass(frozen=True, slots=True)
class ClaimCompleted:
    """The holder of a claim has done what it claimed."""

    member: str
    name: str


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """A checkpoint of `step` is complete at `path`."""

    member: str
    step: int
    path: str


@dataclass(frozen=True, slots=True)
class AdjustmentReported:
    """The members of a world changed shares, batch size or memory use by themselves, from `step` on.

    `what` is shares, batch or memory; `values` are the figures by name. One member reports for all.
    """

    member: str
    step: int
    what: str
    values: dict[str, int]
    reason: str


@dataclass(frozen=True, slots=True)
class ProgressRecorded:
    """The run has committed all steps up to this one; recorded now and then, not at every step."""

    step: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The run has to stop. `until_replaced`: only for lack of members; it resumes when others have joined."""

    reason: str
    checkpoint: bool
    exit_code: int
    until_replaced: bool = False


@dataclass(frozen=True, slots=True)
class ScaleRequested:
    """The user asked for another number of members."""

    min_members: int
    max_members: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer expired; `what` is one of:

    - regroup: the first world need not wait for more members
    - quarantine: a member may be given a seat again
    - notice: all members have to leave, and one of them can no longer wait for replacements
    - proposal: the proposed world was not entered yet, so it is announced again
    - retry: the pause after worlds that failed is over
    """

    what: str


@dataclass(frozen=True, slots=True)
class CoordinatorRestarted:
    """The coordinator replayed its journal: all connections are closed, and every lease restarts."""


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
    """Tell these members to connect a world in the background, beside world `after`.

    It is not `is_new` if it is repeated for members that may have missed it.
    """

    after: int
    world: World
    to: tuple[str, ...]
    reason: str
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class DissolveWorld:
    """Tell these members that all worlds up to `number` have ended."""

    number: int
    to: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class PublishPlacement:
    """Tell these members which servers hold the parts of the state from now on."""

    placement: Placement
    to: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class AnnounceTrainerLost:
    """Tell these servers that a trainer is lost, so that no other trainer waits for it."""

    to: tuple[str, ...]
    member: str
    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class RestoreCheckpoint:
    """Tell a member to load the newest checkpoint."""

    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class RejectMember:
    """Close the connection of this incarnation with an error."""

    member: str
    incarnation: str
    code: str
    what: str
    why: str = ""
    do: str = ""


@dataclass(frozen=True, slots=True)
class EvictMember:
    """Tell a member that it is no longer in the run; it may connect again as a new one."""

    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopMembers:
    """Tell these members to stop, after a checkpoint if `checkpoint`."""

    to: tuple[str, ...]
    reason: str
    checkpoint: bool
    exit_code: int


@dataclass(frozen=True, slots=True)
class EndTraining:
    """Tell these members that the training ends at `step`: those behind it train until there, the others are done."""

    to: tuple[str, ...]
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class AnnounceFinished:
    """Tell these members that the training ended at `step`."""

    to: tuple[str, ...]
    step: int


@dataclass(frozen=True, slots=True)
class GrantClaim:
    """Tell a member that it holds a claim."""

    member: str
    name: str


@dataclass(frozen=True, slots=True)
class AnnounceClaimCompleted:
    """Tell these members that another member has done what they claimed."""

    to: tuple[str, ...]
    name: str


@dataclass(frozen=True, slots=True)
class MembershipNote:
    """A sentence for the story; nothing to carry out. `world` and `step` are those that it is about."""

    text: str
    member: str = ""
    kind: NoteKind = ""
    world: int | None = None
    step: int | None = None


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
    EndTraining,
    AnnounceFinished,
    GrantClaim,
    AnnounceClaimCompleted,
    MembershipNote,
]
