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
from msgspec import Meta

from shoal.core.placement import Placement
from shoal.core.world import Address, World
from shoal.wire.limits import (
    MAX_ITEMS,
    MAX_NAME,
    Amount,
    Bytes,
    Count,
    Integer,
    Measurement,
    Metrics,
    Name,
    Names,
    Real,
    Seconds,
    Text,
)
from shoal.wire.protocol import Message, RejectedMsg

# Valid values of `EvaluatedMsg.best`, such as "max:accuracy".
GOAL = r"^((max|min):\s*\S.*)?$"
# Phase of a heartbeat: the script has left its loop, and only the exit code of its process tells whether it failed.
OUTSIDE_THE_LOOP = "outside the loop"


# --- member to coordinator


class MemberHelloMsg(Message, frozen=True):
    """First message on every connection; the coordinator answers WelcomeMsg or RejectedMsg.

    `world` and `step` are None for a new process. After a reconnect they are the member's present world and the step
    whose state it holds; `broken` says that this world's exchange has failed meanwhile. `done` and `early` repeat a
    DoneMsg.
    """

    protocol: Count
    version: Name
    run: Name
    member: Name
    incarnation: Name
    address: Address
    pid: Count
    world: Count | None = None
    step: Count | None = None
    broken: bool = False
    done: bool = False
    role: Name = "trainer"
    early: bool = False


class ReadyMsg(Message, frozen=True):
    """The member has built its model and can be given a seat in a world.

    `step` is the step whose state it holds, None if it holds none. `restored` says that it has loaded that state from a
    checkpoint, as a RestoreMsg told it to. `speed` is its estimate in samples per second, 0 if unknown. The coordinator
    rejects a member whose `fingerprint` differs from the run's.
    """

    fingerprint: Text
    step: Count | None
    restored: bool = False
    speed: Amount = 0.0


class WorldEnteredMsg(Message, frozen=True):
    """The member has entered a prepared world at `step`; the first such message moves the whole run to that world."""

    world: Count
    step: Count


class PrepareFailedMsg(Message, frozen=True):
    """The member could not connect to the peers of a prepared world, and stays in its present one.

    The coordinator abandons that world and treats the `suspects` as unreachable when it proposes the next.
    """

    world: Count
    suspects: Names = ()
    cause: Text = ""


class WorldBrokenMsg(Message, frozen=True):
    """An exchange in the member's world failed; the member holds the state of `step` (None: no state) and waits.

    The coordinator dissolves the world and forms the next one, without those `suspects` that turn out to be lost.
    """

    world: Count
    step: Count | None
    suspects: Names = ()
    cause: Text = ""


class PartCopiedMsg(Message, frozen=True):
    """A server has copied a part of the state to its learner `to`, which can now become the backup.

    `since` is the number of the placement that requested the copy.
    """

    part: Count
    to: Name
    since: Count


class PartReleasedMsg(Message, frozen=True):
    """A server no longer changes a part of the state, so that its backup can take over; `number` is the placement."""

    part: Count
    number: Count


class ServerUnreachableMsg(Message, frozen=True):
    """The sender cannot reach a server of placement `number`; the coordinator checks whether that server is lost."""

    server: Name
    number: Count
    cause: Text = ""


class StepTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a typical step, by what they were spent on; `wait_s` is spent waiting for the slowest member."""

    data_s: Seconds = 0.0
    compute_s: Seconds = 0.0
    wait_s: Seconds = 0.0
    exchange_s: Seconds = 0.0


class HeartbeatMsg(Message, frozen=True):
    """Renewal of the member's lease, with what it is doing; sent every `heartbeat_s` by a thread of its own.

    `phase` is what the main thread is doing, `phase_age_s` for how long: this is how the coordinator recognises a
    member that hangs. `noise` is the gradient noise scale in samples. `idle` is the fraction of the members' time spent
    waiting, with equal shares (None if unknown) and with the present ones. With servers, `clock` counts the trainer's
    finished tickets, `ahead` is its lead over the slowest trainer when it began its present ticket, and `waits_for`
    names the members that block its next one.
    """

    world: Count | None
    step: Count | None
    phase: Name
    phase_age_s: Seconds
    usual_step_s: Seconds = 0.0
    epoch: Count = 0
    total_steps: Count | None = None
    share: Count = 0
    loss: Measurement | None = None
    samples_per_s: Amount = 0.0
    metrics: Metrics = msgspec.field(default_factory=dict)
    clock: Count = 0
    ahead: Integer = 0
    waits_for: Names = ()
    spent: StepTimes = StepTimes()
    batch: Count = 0
    noise: Real | None = None
    idle: tuple[Real | None, Real] | None = None


class AdjustmentMsg(Message, frozen=True):
    """The members of a world have changed their shares, batch size or memory use, effective from `step`.

    Only rank 0 sends it; the coordinator records it for `shoal why` and shows the latest of each kind.
    """

    step: Count
    what: Name
    values: Annotated[dict[Name, Integer], Meta(max_length=MAX_ITEMS)]
    reason: Text


class LeavingMsg(Message, frozen=True):
    """Notice: the member has to leave within `within_s` seconds (SIGTERM, spot warning, the user).

    A member sends it when it gets the signal, and the coordinator then prepares a world without it. The coordinator
    sends it to the members of a machine whose agent reported the notice.
    """

    within_s: Seconds
    cause: Text


class LeftMsg(Message, frozen=True):
    """Last message of a member that leaves cleanly.

    `world` is the world that the others entered without it, None if it leaves without such a handover.
    """

    step: Count | None
    world: Count | None = None


class DoneMsg(Message, frozen=True):
    """The member has committed the last step, and so has every other member of its world: the run is finished.

    With `early`, this member's script has left its loop before the last step: the training ends there for all.
    """

    step: Count
    early: bool = False


class ClaimMsg(Message, frozen=True):
    """Request to be the one member that does something once, such as writing a file.

    The coordinator answers ClaimGrantedMsg to one member and, once it is done, ClaimAlreadyDoneMsg to the others. If
    the member with the claim is lost, another one gets it.
    """

    name: Text


class ClaimDoneMsg(Message, frozen=True):
    """The member has completed what it was granted."""

    name: Text


class CheckpointWrittenMsg(Message, frozen=True):
    """A durable checkpoint of `step` exists at `path`.

    Its writer tells the coordinator, which records it and forwards it to the evaluator (with size and seconds 0).
    """

    step: Count
    path: Text
    size_bytes: Bytes
    seconds: Amount


class EvaluatedMsg(Message, frozen=True):
    """The evaluator's result for the checkpoint of `step`.

    `export` is where the evaluator stored this model, if it is the best so far. The coordinator keeps the best value of
    the goal `best`, and stops the run after `patience` evaluations without a better one.
    """

    step: Count
    metrics: Metrics
    best: Annotated[str, Meta(pattern=GOAL, max_length=MAX_NAME)] = ""
    patience: Count | None = None
    export: Text = ""


class ExceptionRaisedMsg(Message, frozen=True):
    """The user's code raised; sent just before the process ends, so that the cause is recorded before the loss.

    `step` is the newest step that the member knows to be committed.
    """

    kind: Name
    text: Text
    traceback: Text
    code: Name = ""
    step: Count = 0


# --- coordinator to member


class WelcomeMsg(Message, frozen=True):
    """Answer to a hello. The member sends a heartbeat every `heartbeat_s`; it is evicted after `lease_s` of silence.

    `started` says whether the run has committed a step, `min_members` is the MIN of the run, and `micro_batch` how many
    samples fitted into this member's memory at once, 0 if that was never too little.
    """

    heartbeat_s: Seconds
    lease_s: Seconds
    coordinator: Name
    started: bool
    min_members: Count = 1
    micro_batch: Count = 0


class EnterWorldMsg(Message, frozen=True):
    """Leave any present world, connect to the peers of this one and enter it now."""

    world: World
    reason: Text


class PrepareWorldMsg(Message, frozen=True):
    """Connect to the peers of `world` in the background, while training continues in world `after`.

    The members then agree, through their step reports, on the step after which all of them enter it.
    """

    after: Count
    world: World
    reason: Text


class DissolveWorldMsg(Message, frozen=True):
    """World `number` and all earlier ones have ended: abort their exchanges and answer WorldBrokenMsg."""

    number: Count
    reason: Text


class RestoreMsg(Message, frozen=True):
    """No member holds the state any more: load the newest good checkpoint, then send ReadyMsg with its step."""

    reason: Text


class PlacementMsg(Message, frozen=True):
    """Which servers hold which parts of the state from now on; trainers and servers connect accordingly."""

    placement: Placement
    reason: Text


class TrainerLostMsg(Message, frozen=True):
    """A trainer is lost: servers drop it from the ticket ledger, so that no other trainer waits for it."""

    member: Name
    incarnation: Name
    reason: Text


class EvaluationStatusMsg(Message, frozen=True):
    """State of the evaluation, sent to a new evaluator so that it continues where the last one ended.

    `step` is the last evaluated step, `best_value` the best value of the goal `best` so far.
    """

    step: Count | None = None
    best: Text = ""
    best_step: Count | None = None
    best_value: Real | None = None


class EvictedMsg(Message, frozen=True):
    """The member's lease has expired, or it has left: it is no longer in the run, and may join again with a hello."""

    reason: Text


class StopMsg(Message, frozen=True):
    """Stop after a step that all members agree on, write a checkpoint if `checkpoint`, and exit with `exit_code`."""

    reason: Text
    checkpoint: bool
    exit_code: Integer


class EndTrainingMsg(Message, frozen=True):
    """Training ends at `step`: end the loop there, or at once if that step is committed, and answer DoneMsg."""

    step: Count
    reason: Text


class RunFinishedMsg(Message, frozen=True):
    """The run has trained to its end at `step`: a member outside its last world exits; an evaluator scores the rest."""

    step: Count


class ClaimGrantedMsg(Message, frozen=True):
    """Do what was claimed; no other member will, unless this one is lost before its ClaimDoneMsg."""

    name: Text


class ClaimAlreadyDoneMsg(Message, frozen=True):
    """Another member has completed what was claimed."""

    name: Text


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
    EndTrainingMsg,
    RunFinishedMsg,
    ClaimGrantedMsg,
    ClaimAlreadyDoneMsg,
]
