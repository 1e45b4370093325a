"""Every message on the coordinator's WebSocket, as tagged unions of frozen structs.

A member or an agent opens the socket and says hello; after that both sides send messages freely. Times are
seconds since the epoch on the sender's clock unless a name says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Union

import msgspec

from shoal.core.placement import Placement
from shoal.core.world import Address, World
from shoal.wire.machine_check import Finding, Question

PROTOCOL = 1
GOAL = r"^((max|min):\s*\S.*)?$"


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the tag is the class name."""


# --- member to coordinator


class MemberHello(Message, frozen=True):
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


class Ready(Message, frozen=True):
    """The member has built its model and can be admitted; `step` is the state that it holds, None for none."""

    fingerprint: str
    step: int | None
    restored: bool = False
    speed: float = 0.0


class Broken(Message, frozen=True):
    """The member's exchange failed; it holds the state of `step` (None: none) and waits for another world."""

    world: int
    step: int | None
    suspects: tuple[str, ...] = ()
    cause: str = ""


class Switched(Message, frozen=True):
    """The member entered the proposed world at `step`."""

    world: int
    step: int


class CannotPrepare(Message, frozen=True):
    """The member could not connect the proposed world; it goes on in its own."""

    world: int
    suspects: tuple[str, ...] = ()
    cause: str = ""


class Copied(Message, frozen=True):
    """This server has given a part of the state to its learner; `since` is the placement that asked for it."""

    part: int
    to: str
    since: int


class Yielded(Message, frozen=True):
    """This server has come to rest with a part of the state: its backup can take over."""

    part: int
    number: int


class Unreachable(Message, frozen=True):
    """A server of this placement cannot be reached from here."""

    server: str
    number: int
    cause: str = ""


class Spent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a usual step: reading data, computing, waiting for the slowest, exchanging."""

    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    exchange_s: float = 0.0


class Beat(Message, frozen=True):
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
    spent: Spent = Spent()
    batch: int = 0
    noise: float | None = None
    idle: tuple[float | None, float] | None = None


class Decided(Message, frozen=True):
    """The members of this world changed something by themselves, from `step` on; rank 0 tells."""

    step: int
    what: str
    values: dict[str, int]
    reason: str


class Leaving(Message, frozen=True):
    """The member was told to go away within so many seconds (SIGTERM, spot warning, the user)."""

    within_s: float
    cause: str


class Left(Message, frozen=True):
    """The member goes; `world` is the one that the others crossed into without it, None if there is none."""

    step: int | None
    world: int | None = None


class Done(Message, frozen=True):
    """The member has committed the last step and so has every other member of its world.

    Unless it is `early`: then its script has left the loop, and the others go on without it.
    """

    step: int
    early: bool = False


class Claim(Message, frozen=True):
    """Asks to be the one member that does something once, such as writing a file."""

    name: str


class ClaimDone(Message, frozen=True):
    name: str


class Checkpointed(Message, frozen=True):
    """A durable checkpoint of `step` was written; evaluators are told of it."""

    step: int
    path: str
    size_bytes: int
    seconds: float


class Evaluated(Message, frozen=True):
    """The evaluator has scored the checkpoint of `step`; `export` is where it keeps it, if it is the best so far."""

    step: int
    metrics: dict[str, float]
    best: Annotated[str, msgspec.Meta(pattern=GOAL)] = ""
    patience: int | None = None
    export: str = ""


class Raised(Message, frozen=True):
    """The user's code raised; sent just before the process ends, so that the cause is known before its effects."""

    kind: str
    text: str
    traceback: str
    code: str = ""


# --- coordinator to member


class Welcome(Message, frozen=True):
    """The member is known; `beat_s` is how often to renew the lease, `started` whether the run has trained."""

    beat_s: float
    lease_s: float
    coordinator: str
    started: bool


class Refused(Message, frozen=True):
    """An error that ends the connection, as the fields of a ShoalError."""

    code: str
    what: str
    why: str = ""
    do: str = ""


class Form(Message, frozen=True):
    """Enter this world now."""

    world: World
    reason: str


class Restore(Message, frozen=True):
    """Nobody has the state any more: load the newest good checkpoint, then say Ready with its step."""

    reason: str


class Prepare(Message, frozen=True):
    """Connect this world in the background, while training in world `after`; enter it when the pulse says so."""

    after: int
    world: World
    reason: str


class Dissolve(Message, frozen=True):
    """World `number` and all before it are over; abort, and say Broken."""

    number: int
    reason: str


class Place(Message, frozen=True):
    """Who holds the parts of the state from now on."""

    placement: Placement
    reason: str


class Gone(Message, frozen=True):
    """A trainer is gone: servers drop it, and nobody waits for it."""

    member: str
    incarnation: str
    reason: str


class Standing(Message, frozen=True):
    """How the evaluation stands: `step` is the one that was evaluated last, `best_value` the best of `best` so far."""

    step: int | None = None
    best: str = ""
    best_step: int | None = None
    best_value: float | None = None


class Expelled(Message, frozen=True):
    """The lease ran out; the member is no longer in the run, and may say hello again."""

    reason: str


class Stop(Message, frozen=True):
    """Stop all members after a common step; with `checkpoint`, write one before."""

    reason: str
    checkpoint: bool
    exit_code: int


class Finished(Message, frozen=True):
    """The run is over; a member that is not part of its last world ends now."""

    step: int


class Granted(Message, frozen=True):
    """Do it: nobody else will until you say ClaimDone or are lost."""

    name: str


class AlreadyDone(Message, frozen=True):
    name: str


# --- agent to coordinator


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an agent knows of its machine."""

    name: str
    cores: int
    memory_bytes: int
    devices: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    python: str = ""
    platform: str = ""


class AgentHello(Message, frozen=True):
    """First message of an agent. `slots` is how many members it offers, None for as many as asked.

    `members` are those alive under it, as (run, member, incarnation).
    """

    protocol: int
    version: str
    agent: str
    machine: Machine
    pid: int
    slots: int | None
    members: tuple[tuple[str, str, str], ...] = ()


class AgentBeat(Message, frozen=True):
    load: float
    memory_free_bytes: int


class MemberStarted(Message, frozen=True):
    run: str
    member: str
    incarnation: str
    pid: int
    warm: bool


class MemberExited(Message, frozen=True):
    """A member's process is gone. `cause` is one of: done, user, infrastructure, preempted, asked, refused."""

    run: str
    member: str
    incarnation: str
    exit_code: int | None
    signal: int | None
    cause: str
    detail: str = ""


class MachineNotice(Message, frozen=True):
    """The machine will go away: every member on it should leave."""

    within_s: float
    source: str
    detail: str = ""


class LogLines(Message, frozen=True):
    run: str
    member: str
    lines: tuple[str, ...]


class Examined(Message, frozen=True):
    """The answer to the question of this number."""

    number: int
    finding: Finding


# --- coordinator to agent


class AgentWelcome(Message, frozen=True):
    beat_s: float
    coordinator: str


class StartMember(Message, frozen=True):
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


class EndMember(Message, frozen=True):
    """SIGTERM, then SIGKILL to the whole process tree after the grace."""

    run: str
    member: str
    incarnation: str
    grace_s: float
    reason: str


class Examine(Message, frozen=True):
    """Look at this machine, or at the way to another, and say Examined."""

    number: int
    question: Question


class ShutDown(Message, frozen=True):
    """End every member and go."""

    reason: str


FromMember = Union[
    MemberHello,
    Ready,
    Broken,
    Switched,
    CannotPrepare,
    Copied,
    Yielded,
    Unreachable,
    Beat,
    Leaving,
    Left,
    Done,
    Claim,
    ClaimDone,
    Checkpointed,
    Decided,
    Evaluated,
    Raised,
]
ToMember = Union[
    Welcome,
    Refused,
    Form,
    Restore,
    Prepare,
    Dissolve,
    Place,
    Gone,
    Standing,
    Checkpointed,
    Expelled,
    Stop,
    Finished,
    Granted,
    AlreadyDone,
    Leaving,
]
FromAgent = Union[AgentHello, AgentBeat, MemberStarted, MemberExited, MachineNotice, LogLines, Examined]
ToAgent = Union[AgentWelcome, Refused, StartMember, EndMember, ShutDown, Examine]
