"""Every message on the coordinator's WebSocket, as tagged unions of frozen structs.

A member or an agent opens the socket and says hello; after that both sides send messages freely. Times are
seconds since the epoch on the sender's clock unless a name says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Union

import msgspec

from shoal.core.placement import Placement
from shoal.core.runs.spec import MachineInfo as MachineInfo
from shoal.core.world import Address, World
from shoal.wire.machine_check import CheckRequest, CheckResult

PROTOCOL = 2
GOAL = r"^((max|min):\s*\S.*)?$"


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=lambda name: name.removesuffix("Msg")):
    """Base of all messages; the tag is the class name without `Msg`."""


# --- member to coordinator


class MemberHelloMsg(Message, frozen=True):
    """First message of a member, and of a member that finds the coordinator again.

    `world` and `step` are None for a new process. `broken` says that its world fell apart; for `done` and `early` see
    Done.
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
    """The member has built its model and can be admitted; `step` is the state that it holds, None for none."""

    fingerprint: str
    step: int | None
    restored: bool = False
    speed: float = 0.0


class WorldBrokenMsg(Message, frozen=True):
    """The member's exchange failed; it holds the state of `step` (None: none) and waits for another world."""

    world: int
    step: int | None
    suspects: tuple[str, ...] = ()
    cause: str = ""


class WorldEnteredMsg(Message, frozen=True):
    """The member entered the proposed world at `step`."""

    world: int
    step: int


class PrepareFailedMsg(Message, frozen=True):
    """The member could not connect the proposed world; it goes on in its own."""

    world: int
    suspects: tuple[str, ...] = ()
    cause: str = ""


class PartCopiedMsg(Message, frozen=True):
    """This server has given a part of the state to its learner; `since` is the placement that asked for it."""

    part: int
    to: str
    since: int


class PartReleasedMsg(Message, frozen=True):
    """This server has come to rest with a part of the state: its backup can take over."""

    part: int
    number: int


class ServerUnreachableMsg(Message, frozen=True):
    """A server of this placement cannot be reached from here."""

    server: str
    number: int
    cause: str = ""


class StepTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a usual step: reading data, computing, waiting for the slowest, exchanging."""

    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    exchange_s: float = 0.0


class HeartbeatMsg(Message, frozen=True):
    """Renews the lease and says what the member is doing, and since when.

    `noise` is the gradient noise scale, in samples; `idle` the part of the members' time that is waited away with equal
    shares, if that is known, and with those in force.
    With servers, `clock` is how many tickets it has finished, `ahead` how many more than the slowest had when it began
    the present one, and `waits_for` are the members without which it may not begin another.
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
    metrics: dict[str, float] = {}
    clock: int = 0
    ahead: int = 0
    waits_for: tuple[str, ...] = ()
    spent: StepTimes = StepTimes()
    batch: int = 0
    noise: float | None = None
    idle: tuple[float | None, float] | None = None


class AdjustmentMsg(Message, frozen=True):
    """The members of this world changed something by themselves, from `step` on; rank 0 tells."""

    step: int
    what: str
    values: dict[str, int]
    reason: str


class LeavingMsg(Message, frozen=True):
    """The member was told to go away within so many seconds (SIGTERM, spot warning, the user)."""

    within_s: float
    cause: str


class LeftMsg(Message, frozen=True):
    """The member goes; `world` is the one that the others crossed into without it, None if there is none."""

    step: int | None
    world: int | None = None


class DoneMsg(Message, frozen=True):
    """The member has committed the last step and so has every other member of its world.

    Unless it is `early`: then its script has left the loop, and the others go on without it.
    """

    step: int
    early: bool = False


class ClaimMsg(Message, frozen=True):
    """Asks to be the one member that does something once, such as writing a file."""

    name: str


class ClaimDoneMsg(Message, frozen=True):
    name: str


class CheckpointWrittenMsg(Message, frozen=True):
    """A durable checkpoint of `step` was written; evaluators are told of it."""

    step: int
    path: str
    size_bytes: int
    seconds: float


class EvaluatedMsg(Message, frozen=True):
    """The evaluator has scored the checkpoint of `step`; `export` is where it keeps it, if it is the best so far."""

    step: int
    metrics: dict[str, float]
    best: Annotated[str, msgspec.Meta(pattern=GOAL)] = ""
    patience: int | None = None
    export: str = ""


class ExceptionRaisedMsg(Message, frozen=True):
    """The user's code raised; sent just before the process ends, so that the cause is known before its effects."""

    kind: str
    text: str
    traceback: str
    code: str = ""


# --- coordinator to member


class WelcomeMsg(Message, frozen=True):
    """The member is known; `heartbeat_s` is how often to renew the lease, `started` whether the run has trained."""

    heartbeat_s: float
    lease_s: float
    coordinator: str
    started: bool


class RejectedMsg(Message, frozen=True):
    """An error that ends the connection, as the fields of a ShoalError."""

    code: str
    what: str
    why: str = ""
    do: str = ""


class EnterWorldMsg(Message, frozen=True):
    """Enter this world now."""

    world: World
    reason: str


class RestoreMsg(Message, frozen=True):
    """Nobody has the state any more: load the newest good checkpoint, then say Ready with its step."""

    reason: str


class PrepareWorldMsg(Message, frozen=True):
    """Connect this world in the background, while training in world `after`; enter it when the pulse says so."""

    after: int
    world: World
    reason: str


class DissolveWorldMsg(Message, frozen=True):
    """World `number` and all before it are over; abort, and say Broken."""

    number: int
    reason: str


class PlacementMsg(Message, frozen=True):
    """Who holds the parts of the state from now on."""

    placement: Placement
    reason: str


class TrainerLostMsg(Message, frozen=True):
    """A trainer is gone: servers drop it, and nobody waits for it."""

    member: str
    incarnation: str
    reason: str


class EvaluationStatusMsg(Message, frozen=True):
    """How the evaluation stands: `step` is the one that was evaluated last, `best_value` the best of `best` so far."""

    step: int | None = None
    best: str = ""
    best_step: int | None = None
    best_value: float | None = None


class EvictedMsg(Message, frozen=True):
    """The lease ran out; the member is no longer in the run, and may say hello again."""

    reason: str


class StopMsg(Message, frozen=True):
    """Stop all members after a common step; with `checkpoint`, write one before."""

    reason: str
    checkpoint: bool
    exit_code: int


class RunFinishedMsg(Message, frozen=True):
    """The run is over; a member that is not part of its last world ends now."""

    step: int


class ClaimGrantedMsg(Message, frozen=True):
    """Do it: nobody else will until you say ClaimDone or are lost."""

    name: str


class ClaimAlreadyDoneMsg(Message, frozen=True):
    name: str


# --- agent to coordinator


class AgentHelloMsg(Message, frozen=True):
    """First message of an agent. `slots` is how many members it offers, None for as many as asked.

    `members` are those alive under it, as (run, member, incarnation).
    """

    protocol: int
    version: str
    agent: str
    machine: MachineInfo
    pid: int
    slots: int | None
    members: tuple[tuple[str, str, str], ...] = ()


class AgentHeartbeatMsg(Message, frozen=True):
    load: float
    memory_free_bytes: int


class MemberStartedMsg(Message, frozen=True):
    run: str
    member: str
    incarnation: str
    pid: int
    warm: bool


class MemberExitedMsg(Message, frozen=True):
    """A member's process is gone. `cause` is one of: done, user, infrastructure, preempted, asked, refused."""

    run: str
    member: str
    incarnation: str
    exit_code: int | None
    signal: int | None
    cause: str
    detail: str = ""


class MachineNoticeMsg(Message, frozen=True):
    """The machine will go away: every member on it should leave."""

    within_s: float
    source: str
    detail: str = ""


class LogLinesMsg(Message, frozen=True):
    run: str
    member: str
    lines: tuple[str, ...]


class CheckResultMsg(Message, frozen=True):
    """The answer to the question of this number."""

    number: int
    finding: CheckResult


# --- coordinator to agent


class AgentWelcomeMsg(Message, frozen=True):
    heartbeat_s: float
    coordinator: str


class StartMemberMsg(Message, frozen=True):
    """Start a member from the warm process. `argv` is the script and its arguments; `env` is added to the agent's.

    `project` is what stands for `cwd` on a machine that does not see it.
    """

    run: str
    member: str
    incarnation: str
    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    module: bool = False
    restart: bool = False
    project: str = ""


class StopMemberMsg(Message, frozen=True):
    """SIGTERM, then SIGKILL to the whole process tree after the grace."""

    run: str
    member: str
    incarnation: str
    grace_s: float
    reason: str


class RunCheckMsg(Message, frozen=True):
    """Look at this machine, or at the way to another, and say Examined."""

    number: int
    question: CheckRequest


class ShutDownMsg(Message, frozen=True):
    """End every member and go."""

    reason: str


FromMember = Union[
    MemberHelloMsg,
    ReadyMsg,
    WorldBrokenMsg,
    WorldEnteredMsg,
    PrepareFailedMsg,
    PartCopiedMsg,
    PartReleasedMsg,
    ServerUnreachableMsg,
    HeartbeatMsg,
    LeavingMsg,
    LeftMsg,
    DoneMsg,
    ClaimMsg,
    ClaimDoneMsg,
    CheckpointWrittenMsg,
    AdjustmentMsg,
    EvaluatedMsg,
    ExceptionRaisedMsg,
]
ToMember = Union[
    WelcomeMsg,
    RejectedMsg,
    EnterWorldMsg,
    RestoreMsg,
    PrepareWorldMsg,
    DissolveWorldMsg,
    PlacementMsg,
    TrainerLostMsg,
    EvaluationStatusMsg,
    CheckpointWrittenMsg,
    EvictedMsg,
    StopMsg,
    RunFinishedMsg,
    ClaimGrantedMsg,
    ClaimAlreadyDoneMsg,
    LeavingMsg,
]
FromAgent = Union[
    AgentHelloMsg, AgentHeartbeatMsg, MemberStartedMsg, MemberExitedMsg, MachineNoticeMsg, LogLinesMsg, CheckResultMsg
]
ToAgent = Union[AgentWelcomeMsg, RejectedMsg, StartMemberMsg, StopMemberMsg, ShutDownMsg, RunCheckMsg]
