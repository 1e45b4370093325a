"""How the evaluation of a run's checkpoints stands: what is best so far, and whether it is worth going on.

An evaluator is in no world and holds nothing that others need: it connects, says what it found, and may be gone at any
time. `decide(state, event, now)` returns the next state and what follows; `due` says who has been silent for too long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Union

from shoal.core.membership import events as ev
from shoal.core.membership.state import LastHeartbeat
from shoal.errors import BadEvaluation

# Nobody waits for an evaluator, and it has the lowest priority: it may well be silent for a while.
LEASE_S = 30.0


@dataclass(frozen=True, slots=True)
class Goal:
    """Which metric decides what is best; written ``max:accuracy`` or ``min:loss``."""

    metric: str
    largest: bool

    def better(self, value: float, than: float | None) -> bool:
        if value != value:
            return False
        return than is None or (value > than if self.largest else value < than)


def parse(text: str) -> Goal | None:
    """The goal that a text describes, None for none.

    >>> parse("max:accuracy")
    Goal(metric='accuracy', largest=True)
    """
    if not text:
        return None
    which, _, metric = text.partition(":")
    if which not in ("max", "min") or not metric.strip():
        raise BadEvaluation(f"{text!r} does not say what is best", do='write best="max:accuracy" or best="min:loss"')
    return Goal(metric.strip(), which == "max")


@dataclass(frozen=True, slots=True)
class EvaluationStatus:
    """The latest evaluation and the best one; `without` is how many came after the best."""

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
    """An evaluator has scored the checkpoint of a step; `best` and `patience` are what the script asked for."""

    member: str
    step: int
    metrics: dict[str, float]
    best: str = ""
    patience: int | None = None
    export: str = ""


@dataclass(frozen=True, slots=True)
class SendEvaluationStatus:
    """Tell an evaluator how the evaluation stands, which is also the receipt for what it said."""

    to: tuple[str, ...]
    standing: EvaluationStatus


@dataclass(frozen=True, slots=True)
class AnnounceCheckpoint:
    to: tuple[str, ...]
    step: int
    path: str


@dataclass(frozen=True, slots=True)
class AnnounceTrainingFinished:
    """Tell evaluators that nobody trains any more."""

    to: tuple[str, ...]
    step: int


@dataclass(frozen=True, slots=True)
class EvaluationNote:
    """A line of the story: what an evaluation found, and what that means."""

    member: str
    step: int
    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopEarly:
    """More training does not make it better."""

    reason: str


Instruction = Union[SendEvaluationStatus, EvaluationNote, StopEarly, ev.MembershipNote]


@dataclass(frozen=True, slots=True)
class EvaluatorState:
    """One that is connected, or was lately."""

    name: str
    incarnation: str
    host: str
    since: float
    connected: bool = True


@dataclass(frozen=True, slots=True)
class EvaluationState:
    """The evaluators of one run, and how the evaluation stands."""

    members: Mapping[str, EvaluatorState] = field(default_factory=dict)
    standing: EvaluationStatus = EvaluationStatus()


def decide(state: EvaluationState, event: object, now: float) -> tuple[EvaluationState, tuple[Instruction, ...]]:
    """The next state, and what follows from it; events that concern worlds say nothing here."""
    match event:
        case ev.MemberConnected(name, incarnation, address):
            members = {**state.members, name: EvaluatorState(name, incarnation, address.host, now)}
            return replace(state, members=members), (SendEvaluationStatus((name,), state.standing),)
        case ev.MemberDisconnected(name) if name in state.members:
            gone = replace(state.members[name], connected=False)
            return replace(state, members={**state.members, name: gone}), ()
        case ev.MemberLost(name, reason) if name in state.members:
            return _without(state, name), (ev.MembershipNote(f"{name} is lost: {reason}; nobody waits for it", name),)
        case ev.MemberLeft(name) | ev.MemberDone(name):
            return _without(state, name), ()
        case ev.CoordinatorRestarted():
            # Silence while nobody listened is no silence.
            return replace(state, members={k: replace(one, since=now) for k, one in state.members.items()}), ()
        case EvaluationReported():
            return _judge(state, event, now)
    return state, ()


def due(state: EvaluationState, beats: Mapping[str, LastHeartbeat], now: float) -> tuple[ev.MemberLost, ...]:
    """The evaluators whose lease has run out."""
    lost = []
    for one in state.members.values():
        beat = beats.get(one.name)
        silent_s = now - max(beat.at if beat is not None else 0.0, one.since)
        if silent_s > LEASE_S:
            lost.append(ev.MemberLost(one.name, f"silent for {silent_s:.0f} s"))
    return tuple(lost)


def judge(standing: EvaluationStatus, found: EvaluationReported, now: float) -> EvaluationStatus:
    """How things stand after one more evaluation."""
    goal = parse(found.best)
    value = found.metrics.get(goal.metric) if goal is not None else None
    before = standing.best_value if standing.best == found.best else None
    better = goal is not None and value is not None and goal.better(value, before)
    return EvaluationStatus(
        evaluations=standing.evaluations + 1,
        step=found.step,
        metrics=dict(found.metrics),
        at=now,
        best=found.best,
        best_step=found.step if better else standing.best_step if before is not None else None,
        best_value=value if better else before,
        without=0 if better or goal is None else standing.without + 1,
        patience=found.patience,
        export=found.export or standing.export,
    )


def exhausted(standing: EvaluationStatus) -> str:
    """Why the run should end early, empty if it should not."""
    if standing.patience is None or standing.without < standing.patience:
        return ""
    goal = parse(standing.best)
    name = goal.metric if goal is not None else "it"
    times = f"{standing.without} evaluations" if standing.without != 1 else "1 evaluation"
    if standing.best_value is None:
        return f"stopped early: {name} was no number in {times}"
    best = f"{name} {standing.best_value:.4g} of step {standing.best_step}"
    return f"stopped early: {times} did not improve on {best}"


def _judge(
    state: EvaluationState, found: EvaluationReported, now: float
) -> tuple[EvaluationState, tuple[Instruction, ...]]:
    before = state.standing
    to = SendEvaluationStatus((found.member,), before)
    if before.step == found.step:
        return state, (to,)  # it did not hear the answer, and says it again
    after = judge(before, found, now)
    reason = ""
    if after.best_value is not None and after.best_step != found.step:
        reason = f"the best is {after.best_value:.4g} at step {after.best_step}"
    elif after.best_value is not None:
        reason = "the best so far" + (f", kept in {found.export}" if found.export else "")
    figures = ", ".join(f"{name} {value:.4g}" for name, value in found.metrics.items()) or "no number"
    line = EvaluationNote(found.member, found.step, f"{found.member} evaluated step {found.step}: {figures}", reason)
    told: tuple[Instruction, ...] = (line, replace(to, standing=after))
    why = exhausted(after)
    return replace(state, standing=after), (*told, StopEarly(why)) if why else told


def _without(state: EvaluationState, name: str) -> EvaluationState:
    return replace(state, members={key: one for key, one in state.members.items() if key != name})
