"""The digest of a story: its incidents, each with cause and cost.

A story has a line for every event and decision, most of them routine: connections, checkpoints, processes that start.
Each line has a kind in the user's terms (`kind_of`), and the digest keeps the kinds in `DIGEST`. A loss is reported
twice, by the membership and by the exit of its process; the digest keeps the former, with the reason of the exit. What
an incident cost is known once the next world has formed: how long training stood still, and how many steps are
repeated. Repeated incidents become one with a count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.cli.output import table
from shoal.cli.output.lines import sentence
from shoal.core.nouns import be, counted
from shoal.wire.api import StoryLine

LOSS, HANG, LEAVE, BREAK = "loss", "hang", "leave", "break"
# What each kind of line counts as.
KINDS = {
    "RunCreated": "start",
    "RunResumed": "start",
    "UserStopRequested": "stop",
    "StopEarly": "stop",
    "StopRunOverBudget": "stop",
    "ExceptionReported": "failure",
    "MarkRunFailed": "failure",
    "FailInfeasibleRun": "failure",
    "RejectMember": "failure",
    "MarkRunEnded": "end",
    "AnnounceFinished": "end",
    "SharesDecided": "shares",
    "BatchDecided": "batch",
    "MemoryDecided": "memory",
    "LossDecided": "failure",
    "BudgetSet": "scale",
    "AgentNotice": LEAVE,
    "SubmitAllocation": "machines",
    "CancelAllocation": "machines",
    "ProvisioningNote": "machines",
    "CheckpointWritten": "checkpoint",
    "EvaluationNote": "evaluation",
    "MemberHung": HANG,
    "MemberLost": LOSS,
    "AgentLost": LOSS,
    "MemberLeaving": LEAVE,
    "MemberLeft": LEAVE,
    "WorldEntered": "join",
    "RunScaled": "scale",
    "CheckpointRestored": "restore",
    "TrainingStartedOver": "restore",
    "GroupRestarted": "restart",
    "CoordinatorRestarted": "restart",
    "MemberGivenUp": "failure",
}
ROUTINE = "routine"
HIDDEN = ("checkpoint", "evaluation", ROUTINE)
DIGEST = (
    *("start", LOSS, HANG, LEAVE, BREAK, "join", "restore", "restart", "scale", "shares", "batch", "memory"),
    *("machines", "failure", "stop", "end"),
)
PLANNED_EXITS = ("exit code 0", "exit code 75", "signal 15")
# An exit and the loss of its member are reported within this time.
TOGETHER_S = 5.0


@dataclass(frozen=True, slots=True)
class Incident:
    """One or several equal incidents; `line` is the last of them, `first_at` the time of the first."""

    kind: str
    line: StoryLine
    first_at: float
    cause: str = ""
    cost: str = ""
    count: int = 1

    @property
    def text(self) -> str:
        """What happened, why, how often, and what it cost."""
        text = f"{self.line.text} ({self.cause})" if self.cause else sentence(self.line)
        if self.count > 1:
            text += f"; {self.count} times in {table.span(self.line.at - self.first_at)}"
        return f"{text}; {self.cost}" if self.cost else text


def kind_of(line: StoryLine) -> str:
    """Return the kind of a line in the user's terms."""
    if line.kind == "ProcessExited":
        return ROUTINE if line.text.endswith(PLANNED_EXITS) else LOSS
    return KINDS.get(line.kind, ROUTINE)


def digest(story: Sequence[StoryLine], last_step: int = 0, also: Sequence[str] = ()) -> list[Incident]:
    """Return the incidents of a story in the order of time, and the lines of the kinds `also`.

    `last_step` is the step that the run has reached.
    """
    # Imported late: the summary loads more than the rest of this command.
    from shoal.cli.output.summary import changes

    costs = {change.world: change for change in changes(story, last_step=last_step)}
    reasons = {line.world: line.reason for line in story if line.kind == "ProposeWorld"}
    loss_notes = [
        (line.member, line.at)
        for line in story
        if line.kind != "ProcessExited" and kind_of(line) in (LOSS, HANG, LEAVE, "failure")
    ]
    exits = [line for line in story if line.kind == "ProcessExited" and kind_of(line) == LOSS]
    incidents: list[Incident] = []
    stopped = False
    broken: StoryLine | None = None
    since_world = 0
    for line in story:
        kind = kind_of(line)
        if line.kind in ("WorldBroken", "DissolveWorld"):
            broken = broken or line
        elif line.kind == "FormWorld":
            change = costs.get(line.world or 0)
            if broken is not None and change is not None and change.formed_s is not None:
                cost = f"training stood still for {table.span(change.formed_s)}, {_repeated(change.steps_repeated)}"
                _charge(incidents, since_world, broken, cost)
            broken, since_world = None, len(incidents)
        elif (
            (kind in DIGEST or kind in also)
            and not _is_reported(line, loss_notes)
            and not (stopped and line.kind == "MemberLeft")
        ):
            # All members leave a run that is stopped.
            stopped = kind == "stop" or (stopped and kind != "start")
            cause = reasons.get(line.world, "") if kind == "join" else _exit_reason(line, kind, exits)
            incidents.append(Incident(kind, line, line.at, cause))
    return _grouped(incidents)


def _charge(incidents: list[Incident], start: int, broken: StoryLine, cost: str) -> None:
    """Add the cost of a new world to the incident that made it necessary; without one, the break is an incident."""
    for index in range(len(incidents) - 1, start - 1, -1):
        if incidents[index].kind in (LOSS, HANG, LEAVE):
            incidents[index] = replace(incidents[index], cost=cost)
            return
    incidents.append(Incident(BREAK, broken, broken.at, cost=cost))


def _is_reported(line: StoryLine, loss_notes: Sequence[tuple[str, float]]) -> bool:
    """Return whether the exit of a process is the loss of a member that the story tells elsewhere."""
    return line.kind == "ProcessExited" and any(
        member == line.member and abs(at - line.at) < TOGETHER_S for member, at in loss_notes
    )


def _exit_reason(line: StoryLine, kind: str, exits: Sequence[StoryLine]) -> str:
    """Return why the process of a lost member ended, if that is known."""
    if kind != LOSS or line.kind == "ProcessExited":
        return ""
    reasons = (end.reason for end in exits if end.member == line.member and abs(end.at - line.at) < TOGETHER_S)
    return next((reason for reason in reasons if reason not in line.text), "")


def _repeated(steps: int) -> str:
    return f"{counted(steps, 'step')} {be(steps)} repeated" if steps else "no step is repeated"


def _grouped(incidents: Sequence[Incident]) -> list[Incident]:
    """Return the incidents with consecutive equal ones as one; numbers in their texts may differ.

    Lines of routine kinds, which the user asked for by name, stay as they are.
    """
    groups: list[Incident] = []
    for incident in incidents:
        last = groups[-1] if groups else None
        if last is not None and incident.kind not in HIDDEN and _key(last) == _key(incident):
            groups[-1] = replace(incident, first_at=last.first_at, count=last.count + 1)
        else:
            groups.append(incident)
    return groups


def _key(incident: Incident) -> tuple[str, str, str]:
    text = "" if incident.kind == "shares" else re.sub(r"\d+(\.\d+)?", "#", incident.line.text)
    return incident.kind, incident.line.member, text
