"""Evaluation of a run's checkpoints: the best so far, and whether training on is worthwhile.

An evaluator is in no world and holds nothing that other members need. It connects, scores checkpoints, reports, and may
disappear at any time; only its lease is watched. `decide(state, event, now)` returns the next state and instructions,
`due` the evaluators whose lease has expired.

A script may name a goal, such as ``max:accuracy``, and a patience: the run stops early after so many evaluations in a
row without a better value. A report that arrives twice (the reply was lost) is counted once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Union

from shoal.core.membership import events as ev
from shoal.core.membership.state import LastHeartbeat
from shoal.core.nouns import counted
from shoal.errors import BadEvaluation

# No member waits for an evaluator, and it has the lowest priority: it may be silent for a while.
LEASE_S = 30.0


@dataclass(frozen=True, slots=True)
class Goal:
    """The metric to maximise or minimise; written ``max:accuracy`` or ``min:loss``."""

    metric: str
    largest: bool

    def is_better(self, value: float, than: float | None) -> bool:
        """Return whether a value is better than another; NaN never is."""
        if value != value:
            return False
        return than is None or (value > than if self.largest else value < than)


def parse(text: str) -> Goal | None:
    """Return the goal that a text describes, None for the empty text; raise BadEvaluation.

    >>> parse("max:accuracy")
    Goal(metric='accuracy', largest=True)
    """
    if not text:
        return None
    direction, _, metric = text.partition(":")
    if direction not in ("max", "min") or not metric.strip():
        raise BadEvaluation(f"invalid best={text!r}", do='write best="max:accuracy" or best="min:loss"')
    return Goal(metric.strip(), direction == "max")


@dataclass(frozen=True, slots=True)
class EvaluationStatus:
    """The latest evaluation and the best one; `without` counts the evaluations since the best."""

    evaluations: int = 0
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    at: float = 0.0
    best: str = ""
    best_step: int | None = None
    best_value: float | None = None
    without: int = 0
    patience: int | None = None
    export: str = ""


@dataclass(frozen=True, slots=True)
class EvaluationReported:
    """An evaluator scored the checkpoint of a step; `best` and `patience` are the script's goal and patience."""

    member: str
    step: int
    metrics: dict[str, float]
    best: str = ""
    patience: int | None = None
    export: str = ""


@dataclass(frozen=True, slots=True)
class SendEvaluationStatus:
    """Send an evaluator the status, which also acknowledges its report."""

    to: tuple[str, ...]
    status: EvaluationStatus


@dataclass(frozen=True, slots=True)
class AnnounceCheckpoint:
    """Tell evaluators that a checkpoint can be scored."""

    to: tuple[str, ...]
    step: int
    path: str


@dataclass(frozen=True, slots=True)
class AnnounceTrainingFinished:
    """Tell evaluators that no further checkpoint will be written."""

    to: tuple[str, ...]
    step: int


@dataclass(frozen=True, slots=True)
class EvaluationNote:
    """A line of the story: the result of an evaluation."""

    member: str
    step: int
    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopEarly:
    """Stop the run: further training does not improve the metric."""

    reason: str


Instruction = Union[SendEvaluationStatus, EvaluationNote, StopEarly, ev.MembershipNote]


@dataclass(frozen=True, slots=True)
class EvaluatorState:
    """An evaluator that is connected, or was until recently."""

    name: str
    incarnation: str
    host: str
    since: float
    connected: bool = True


@dataclass(frozen=True, slots=True)
class EvaluationState:
    """The evaluators of one run and the status of the evaluation."""

    members: Mapping[str, EvaluatorState] = field(default_factory=dict)
    status: EvaluationStatus = EvaluationStatus()


def decide(state: EvaluationState, event: object, now: float) -> tuple[EvaluationState, tuple[Instruction, ...]]:
    """Return the next state and the instructions to carry out; events about worlds change nothing."""
    match event:
        case ev.MemberConnected(name, incarnation, address):
            members = {**state.members, name: EvaluatorState(name, incarnation, address.host, now)}
            return replace(state, members=members), (SendEvaluationStatus((name,), state.status),)
        case ev.MemberDisconnected(name) if name in state.members:
            disconnected = replace(state.members[name], connected=False)
            return replace(state, members={**state.members, name: disconnected}), ()
        case ev.MemberLost(name, reason) if name in state.members:
            note = ev.MembershipNote(f"{name} was lost: {reason}; training continues", name, event.note_kind)
            return _without(state, name), (note,)
        case ev.MemberLeft(name) | ev.MemberDone(name):
            return _without(state, name), ()
        case ev.CoordinatorRestarted():
            # Heartbeats missed while the coordinator was down do not count.
            members = {name: replace(member, since=now) for name, member in state.members.items()}
            return replace(state, members=members), ()
        case EvaluationReported():
            return _on_report(state, event, now)
    return state, ()


def due(state: EvaluationState, heartbeats: Mapping[str, LastHeartbeat], now: float) -> tuple[ev.MemberLost, ...]:
    """Return an event for each evaluator whose lease has expired."""
    lost = []
    for member in state.members.values():
        heartbeat = heartbeats.get(member.name)
        silent_s = now - max(heartbeat.at if heartbeat is not None else 0.0, member.since)
        if silent_s > LEASE_S:
            lost.append(ev.MemberLost(member.name, f"silent for {silent_s:.0f} s"))
    return tuple(lost)


def updated_status(status: EvaluationStatus, report: EvaluationReported, now: float) -> EvaluationStatus:
    """Return the status after one more evaluation; with another goal, the best starts over."""
    goal = parse(report.best)
    value = report.metrics.get(goal.metric) if goal is not None else None
    before = status.best_value if status.best == report.best else None
    better = goal is not None and value is not None and goal.is_better(value, before)
    return EvaluationStatus(
        evaluations=status.evaluations + 1,
        step=report.step,
        metrics=dict(report.metrics),
        at=now,
        best=report.best,
        best_step=report.step if better else status.best_step if before is not None else None,
        best_value=value if better else before,
        without=0 if better or goal is None else status.without + 1,
        patience=report.patience,
        export=report.export or status.export,
    )


def why_stop_early(status: EvaluationStatus) -> str:
    """Return why the run should stop early, empty if it should not."""
    if status.patience is None or status.without < status.patience:
        return ""
    goal = parse(status.best)
    name = goal.metric if goal is not None else "it"
    times = counted(status.without, "evaluation")
    if status.best_value is None:
        return f"stopped early: {name} was not a number in {times}"
    best = f"{name} {status.best_value:.4g} of step {status.best_step}"
    return f"stopped early: {times} did not improve on {best}"


def _on_report(
    state: EvaluationState, report: EvaluationReported, now: float
) -> tuple[EvaluationState, tuple[Instruction, ...]]:
    before = state.status
    reply = SendEvaluationStatus((report.member,), before)
    if before.step == report.step:
        return state, (reply,)  # the reply was lost, and the report repeated
    after = updated_status(before, report, now)
    reason = ""
    if after.best_value is not None and after.best_step != report.step:
        reason = f"best is {after.best_value:.4g} at step {after.best_step}"
    elif after.best_value is not None:
        reason = "best so far" + (f", exported to {report.export}" if report.export else "")
    figures = ", ".join(f"{name} {value:.4g}" for name, value in report.metrics.items()) or "no number"
    note = EvaluationNote(
        report.member, report.step, f"{report.member} evaluated step {report.step}: {figures}", reason
    )
    instructions: tuple[Instruction, ...] = (note, replace(reply, status=after))
    why = why_stop_early(after)
    return replace(state, status=after), (*instructions, StopEarly(why)) if why else instructions


def _without(state: EvaluationState, name: str) -> EvaluationState:
    return replace(state, members={key: member for key, member in state.members.items() if key != name})
