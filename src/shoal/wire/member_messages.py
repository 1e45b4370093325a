"""Messages between a member and its coordinator, over one WebSocket.

A member opens the socket, sends MemberHelloMsg and gets WelcomeMsg or RejectedMsg. From then on both sides send freely;
there are no replies that a sender blocks on. A connection may break at any time: after a reconnect the member sends its
hello again, followed by every message that describes a state rather than an event (readiness, notice, open and
completed claims, adjustments), so that nothing the coordinator needs is lost with a connection.

In each section the messages stand in the order in which a member's life brings them.
"""

from __future__ import annotations

from typing import Annotated, Union

import msgspec

from shoal.core.placement import Placement
from shoal.core.world import Address, World
from shoal.wire.protocol import Message, RejectedMsg

# Valid values of `EvaluatedMsg.best`, such as "max:accuracy".
GOAL = r"^((max|min):\s*\S.*)?$"


# --- member to coordinator


class MemberHelloMsg(Message, frozen=True):
    """First message on every connection; the coordinator answers WelcomeMsg or RejectedMsg.

    `world` and `step` are None for a new process. After a reconnect they are the member's present world and the step
    whose state it holds; `broken` says that this world's exchange has failed meanwhile. `done` and `early` repeat a
    DoneMsg.
    """

    protocol: int
    version: str
    run: str
    member: str
    incarnation: str
    address: Address
    pid: int
    world: int | None = None
    step: int | None = None
    broken: bool = False
    done: bool = False
    role: str = "trainer"
    early: bool = False


class ReadyMsg(Message, frozen=True):
    """The member has built its model and can be given a seat in a world.

    `step` is the step whose state it holds, None if it holds none. `restored` says that it has loaded that state from a
    checkpoint, as a RestoreMsg told it to. `speed` is its estimate in samples per second, 0 if unknown. The coordinator
    rejects a member whose `fingerprint` differs from the run's.
    """

    fingerprint: str
    step: int | None
    restored: bool = False
    speed: float = 0.0


class WorldEnteredMsg(Message, frozen=True):
    """The member has entered a prepared world at `step`; the first such message moves the whole run to that world."""

    world: int
    step: int


class PrepareFailedMsg(Message, frozen=True):
    """The member could not connect to the peers of a prepared world, and stays in its present one.

    The coordinator abandons that world and treats the `suspects` as unreachable when it proposes the next.
    """

    world: int
    suspects: tuple[str, ...] = ()
    cause: str = ""


class WorldBrokenMsg(Message, frozen=True):
    """An exchange in the member's world failed; the member holds the state of `step` (None: no state) and waits.

    The coordinator dissolves the world and forms the next one, without those `suspects` that turn out to be lost.
    """

    world: int
    step: int | None
    suspects: tuple[str, ...] = ()
    cause: str = ""


class PartCopiedMsg(Message, frozen=True):
    """A server has copied a part of the state to its learner `to`, which can now become the backup.

    `since` is the number of the placement that requested the copy.
    """

    part: int
    to: str
    since: int


class PartReleasedMsg(Message, frozen=True):
    """A server no longer changes a part of the state, so that its backup can take over; `number` is the placement."""

    part: int
    number: int


class ServerUnreachableMsg(Message, frozen=True):
    """The sender cannot reach a server of placement `number`; the coordinator checks whether that server is lost."""

    server: str
    number: int
    cause: str = ""


class StepTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a typical step, by what they were spent on; `wait_s` is spent waiting for the slowest member."""

    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    exchange_s: float = 0.0


class HeartbeatMsg(Message, frozen=True):
    """Renewal of the member's lease, with what it is doing; sent every `heartbeat_s` by a thread of its own.

    `phase` is what the main thread is doing, `phase_age_s` for how long: this is how the coordinator recognises a
    member that hangs. `noise` is the gradient noise scale in samples. `idle` is the fraction of the members' time spent
    waiting, with equal shares (None if unknown) and with the present ones. With servers, `clock` counts the trainer's
    finished tickets, `ahead` is its lead over the slowest trainer when it began its present ticket, and `waits_for`
    names the members that block its next one.
    """

    world: int | None
    step: int | None
    phase: str
    phase_age_s: float
    usual_step_s: float = 0.0
    epoch: int = 0
    total_steps: int | None = None
    share: int = 0
    loss: float | None = None
    samples_per_s: float = 0.0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    clock: int = 0
    ahead: int = 0
    waits_for: tuple[str, ...] = ()
    spent: StepTimes = StepTimes()
    batch: int = 0
    noise: float | None = None
    idle: tuple[float | None, float] | None = None


class AdjustmentMsg(Message, frozen=True):
    """The members of a world have changed their shares, batch size or memory use, effective from `step`.

    Only rank 0 sends it; the coordinator records it for `shoal why` and shows the latest of each kind.
    """

    step: int
    what: str
    values: dict[str, int]
    reason: str


class LeavingMsg(Message, frozen=True):
    """Notice: the member has to leave within `within_s` seconds (SIGTERM, spot warning, the user).

    A member sends it when it gets the signal, and the coordinator then prepares a world without it. The coordinator
    sends it to the members of a machine whose agent reported the notice.
    """

    within_s: float
    cause: str


class LeftMsg(Message, frozen=True):
    """Last message of a member that leaves cleanly.

    `world` is the world that the others entered without it, None if it leaves without such a handover.
    """

    step: int | None
    world: int | None = None


class DoneMsg(Message, frozen=True):
    """The member has committed the last step, and so has every other member of its world: the run is finished.

    With `early`, only this member's script has left its loop; the others continue without it.
    """

    step: int
    early: bool = False


class ClaimMsg(Message, frozen=True):
    """Request to be the one member that does something once, such as writing a file.

    The coordinator answers ClaimGrantedMsg to one member and, once it is done, ClaimAlreadyDoneMsg to the others. If
    the member with the claim is lost, another one gets it.
    """

    name: str


class ClaimDoneMsg(Message, frozen=True):
    """The member has completed what it was granted."""

    name: str


class CheckpointWrittenMsg(Message, frozen=True):
    """A durable checkpoint of `step` exists at `path`.

    Its writer tells the coordinator, which records it and forwards it to the evaluator (with size and seconds 0).
    """

    step: int
    path: str
    size_bytes: int
    seconds: float


class EvaluatedMsg(Message, frozen=True):
    """The evaluator's result for the checkpoint of `step`.

    `export` is where the evaluator stored this model, if it is the best so far. The coordinator keeps the best value of
    the goal `best`, and stops the run after `patience` evaluations without a better one.
    """

    step: int
    metrics: dict[str, float]
    best: Annotated[str, msgspec.Meta(pattern=GOAL)] = ""
    patience: int | None = None
    export: str = ""


class ExceptionRaisedMsg(Message, frozen=True):
    """The user's code raised; sent just before the process ends, so that the cause is recorded before the loss.

    `step` is the newest step that the member knows to be committed.
    """

    kind: str
    text: str
    traceback: str
    code: str = ""
    step: int = 0


# --- coordinator to member


class WelcomeMsg(Message, frozen=True):
    """Answer to a hello. The member sends a heartbeat every `heartbeat_s`; it is evicted after `lease_s` of silence.

    `started` says whether the run has committed a step.
    """

    heartbeat_s: float
    lease_s: float
    coordinator: str
    started: bool


class EnterWorldMsg(Message, frozen=True):
    """Leave any present world, connect to the peers of this one and enter it now."""

    world: World
    reason: str


class PrepareWorldMsg(Message, frozen=True):
    """Connect to the peers of `world` in the background, while training continues in world `after`.

    The members then agree, through their step reports, on the step after which all of them enter it.
    """

    after: int
    world: World
    reason: str


class DissolveWorldMsg(Message, frozen=True):
    """World `number` and all earlier ones have ended: abort their exchanges and answer WorldBrokenMsg."""

    number: int
    reason: str


class RestoreMsg(Message, frozen=True):
    """No member holds the state any more: load the newest good checkpoint, then send ReadyMsg with its step."""

    reason: str


class PlacementMsg(Message, frozen=True):
    """Which servers hold which parts of the state from now on; trainers and servers connect accordingly."""

    placement: Placement
    reason: str


class TrainerLostMsg(Message, frozen=True):
    """A trainer is lost: servers drop it from the ticket ledger, so that no other trainer waits for it."""

    member: str
    incarnation: str
    reason: str


class EvaluationStatusMsg(Message, frozen=True):
    """State of the evaluation, sent to a new evaluator so that it continues where the last one ended.

    `step` is the last evaluated step, `best_value` the best value of the goal `best` so far.
    """

    step: int | None = None
    best: str = ""
    best_step: int | None = None
    best_value: float | None = None


class EvictedMsg(Message, frozen=True):
    """The member's lease has expired, or it has left: it is no longer in the run, and may join again with a hello."""

    reason: str


class StopMsg(Message, frozen=True):
    """Stop after a step that all members agree on, write a checkpoint if `checkpoint`, and exit with `exit_code`."""

    reason: str
    checkpoint: bool
    exit_code: int


class RunFinishedMsg(Message, frozen=True):
    """The run has trained to its end at `step`: a member outside its last world exits; an evaluator scores the rest."""

    step: int


class ClaimGrantedMsg(Message, frozen=True):
    """Do what was claimed; no other member will, unless this one is lost before its ClaimDoneMsg."""

    name: str


class ClaimAlreadyDoneMsg(Message, frozen=True):
    """Another member has completed what was claimed."""

    name: str


FromMember = Union[
    MemberHelloMsg,
    ReadyMsg,
    WorldEnteredMsg,
    PrepareFailedMsg,
    WorldBrokenMsg,
    PartCopiedMsg,
    PartReleasedMsg,
    ServerUnreachableMsg,
    HeartbeatMsg,
    AdjustmentMsg,
    LeavingMsg,
    LeftMsg,
    DoneMsg,
    ClaimMsg,
    ClaimDoneMsg,
    CheckpointWrittenMsg,
    EvaluatedMsg,
    ExceptionRaisedMsg,
]
ToMember = Union[
    WelcomeMsg,
    RejectedMsg,
    EnterWorldMsg,
    PrepareWorldMsg,
    DissolveWorldMsg,
    RestoreMsg,
    PlacementMsg,
    TrainerLostMsg,
    CheckpointWrittenMsg,
    EvaluationStatusMsg,
    LeavingMsg,
    EvictedMsg,
    StopMsg,
    RunFinishedMsg,
    ClaimGrantedMsg,
    ClaimAlreadyDoneMsg,
]
