"""Messages between an agent and its coordinator, over one WebSocket.

An agent opens the socket, sends AgentHelloMsg and gets AgentWelcomeMsg or RejectedMsg. From then on the coordinator
sends instructions (start, stop, check, shut down) and the agent reports what happened. The agent keeps unsent reports
while it is disconnected and repeats recent exits after a reconnect, so the coordinator ignores an exit that it already
knows.
"""

from __future__ import annotations

from typing import Annotated, Union

from msgspec import Meta

from shoal.core.fleet.state import MAX_MEMBERS
from shoal.core.runs.spec import MachineInfo
from shoal.wire.limits import MAX_ITEMS, Amount, Bytes, Count, Digest, Integer, Labels, Name, Seconds, Text, Texts
from shoal.wire.machine_check import CheckRequest, CheckResult
from shoal.wire.protocol import Message, RejectedMsg

# --- agent to coordinator


class AgentHelloMsg(Message, frozen=True):
    """First message on every connection; the coordinator answers AgentWelcomeMsg or RejectedMsg.

    `slots` is how many members the agent accepts, None for any number. `members` are the live ones that it has already
    started, as (run, member, incarnation), so that a restarted coordinator does not start them twice.
    """

    protocol: Count
    version: Name
    agent: Name
    machine: MachineInfo
    pid: Count
    slots: Annotated[int, Meta(ge=0, le=MAX_MEMBERS)] | None
    members: Annotated[tuple[tuple[Name, Name, Name], ...], Meta(max_length=MAX_ITEMS)] = ()


class AgentHeartbeatMsg(Message, frozen=True):
    """Sign of life with the machine's load; the coordinator closes a connection that is silent for ten seconds."""

    load: Amount
    memory_free_bytes: Bytes


class MemberStartedMsg(Message, frozen=True):
    """Answer to StartMemberMsg: the process exists; `warm` says whether it was forked from the warm process."""

    run: Name
    member: Name
    incarnation: Name
    pid: Count
    warm: bool


class MemberExitedMsg(Message, frozen=True):
    """A member's process has ended, or could not be started; the coordinator decides whether to restart it.

    `cause` is done, user, infrastructure, preempted, asked or refused (`core/exit_causes`).
    """

    run: Name
    member: Name
    incarnation: Name
    exit_code: Integer | None
    signal: Integer | None
    cause: Text
    detail: Text = ""


class MachineNoticeMsg(Message, frozen=True):
    """The machine shuts down in `within_s` seconds; the coordinator gives notice to every member on it."""

    within_s: Seconds
    source: Name
    detail: Text = ""


class LogLinesMsg(Message, frozen=True):
    """Lines that a member printed, for the coordinator's copy of its log; the full file stays on the machine."""

    run: Name
    member: Name
    lines: Texts


class CheckResultMsg(Message, frozen=True):
    """Answer to the RunCheckMsg with the same number."""

    number: Count
    finding: CheckResult


# --- coordinator to agent


class AgentWelcomeMsg(Message, frozen=True):
    """Answer to a hello; `heartbeat_s` grows with the number of agents."""

    heartbeat_s: Seconds
    coordinator: Name


class StartMemberMsg(Message, frozen=True):
    """Start a member from the warm process.

    `argv` is the script and its arguments, or with `module` a module and its arguments. `env` is added to the agent's
    own environment. `project` is the hash of the project that replaces `cwd` on a machine that does not share its disk.
    """

    run: Name
    member: Name
    incarnation: Name
    argv: Texts
    cwd: Text
    env: Labels
    module: bool = False
    restart: bool = False
    project: Digest = ""


class StopMemberMsg(Message, frozen=True):
    """Send SIGTERM to a member, then after `grace_s` seconds SIGKILL to its whole process tree."""

    run: Name
    member: Name
    incarnation: Name
    grace_s: Seconds
    reason: Text


class RunCheckMsg(Message, frozen=True):
    """Examine this machine, or the connection to another one, and answer CheckResultMsg (`shoal doctor POOL`)."""

    number: Count
    question: CheckRequest


class ShutDownMsg(Message, frozen=True):
    """Stop every member and exit."""

    reason: Text


FromAgent = Union[
    AgentHelloMsg, AgentHeartbeatMsg, MemberStartedMsg, MemberExitedMsg, MachineNoticeMsg, LogLinesMsg, CheckResultMsg
]
ToAgent = Union[AgentWelcomeMsg, RejectedMsg, StartMemberMsg, StopMemberMsg, RunCheckMsg, ShutDownMsg]
