"""How the evaluation of a run's checkpoints stands: what is best so far, and whether it is worth going on.

An evaluator is in no world and holds nothing that others need: it connects, says what it found, and may be gone at any
time. `decide(state, event, now)` returns the next state and what follows; `due` says who has been silent for too long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Union

from shoal.core.membership import events as ev
from shoal.core.membership.state import Beat
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
class Standing:
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
class Evaluated:
    """An evaluator has scored the checkpoint of a step; `best` and `patience` are what the script asked for."""

    member: str
    step: int
    metrics: dict[str, float]
    best: str = ""
    patience: int | None = None
    export: str = ""


@dataclass(frozen=True, slots=True)
class TellStanding:
    """Tell an evaluator how the evaluation stands, which is also the receipt for what it said."""

    to: tuple[str, ...]
    standing: Standing


@dataclass(frozen=True, slots=True)
class TellCheckpoint:
    to: tuple[str, ...]
    step: int
    path: str


@dataclass(frozen=True, slots=True)
class TellTrained:
    """Tell evaluators that nobody trains any more."""

    to: tuple[str, ...]
    step: int


@dataclass(frozen=True, slots=True)
class Judged:
    """A line of the story: what an evaluation found, and what that means."""

    member: str
    step: int
    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopEarly:
    """More training does not make it better."""

    reason: str


Instruction = Union[TellStanding, Judged, StopEarly, ev.Say]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """One that is connected, or was lately."""

    name: str
    incarnation: str
    host: str
    since: float
    connected: bool = True


@dataclass(frozen=True, slots=True)
class State:
    """The evaluators of one run, and how the evaluation stands."""

    members: Mapping[str, Evaluator] = field(default_factory=dict)
    standing: Standing = Standing()


def decide(state: State, event: object, now: float) -> tuple[State, tuple[Instruction, ...]]:
    """The next state, and what follows from it; events that concern worlds say nothing here."""
    match event:
        case ev.Hello(name, incarnation, address):
            members = {**state.members, name: Evaluator(name, incarnation, address.host, now)}
            return replace(state, members=members), (TellStanding((name,), state.standing),)
        case ev.Disconnected(name) if name in state.members:
            gone = replace(state.members[name], connected=False)
            return replace(state, members={**state.members, name: gone}), ()
        case ev.Lost(name, reason) if name in state.members:
            return _without(state, name), (ev.Say(f"{name} is lost: {reason}; nobody waits for it", name),)
        case ev.MemberLeft(name) | ev.MemberDone(name):
            return _without(state, name), ()
        case ev.CoordinatorRestarted():
            # Silence while nobody listened is no silence.
            return replace(state, members={k: replace(one, since=now) for k, one in state.members.items()}), ()
        case Evaluated():
            return _judge(state, event, now)
    return state, ()


def due(state: State, beats: Mapping[str, Beat], now: float) -> tuple[ev.Lost, ...]:
    """The evaluators whose lease has run out."""
    lost = []
    for one in state.members.values():
        beat = beats.get(one.name)
        silent_s = now - max(beat.at if beat is not None else 0.0, one.since)
        if silent_s > LEASE_S:
            lost.append(ev.Lost(one.name, f"silent for {silent_s:.0f} s"))
    return tuple(lost)


def judge(standing: Standing, found: Evaluated, now: float) -> Standing:
    """How things stand after one more evaluation."""
    goal = parse(found.best)
    value = found.metrics.get(goal.metric) if goal is not None else None
    before = standing.best_value if standing.best == found.best else None
    better = goal is not None and value is not None and goal.better(value, before)
    return Standing(
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


def exhausted(standing: Standing) -> str:
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


def _judge(state: State, found: Evaluated, now: float) -> tuple[State, tuple[Instruction, ...]]:
    before = state.standing
    to = TellStanding((found.member,), before)
    if before.step == found.step:
        return state, (to,)  # it did not hear the answer, and says it again
    after = judge(before, found, now)
    reason = ""
    if after.best_value is not None and after.best_step != found.step:
        reason = f"the best is {after.best_value:.4g} at step {after.best_step}"
    elif after.best_value is not None:
        reason = "the best so far" + (f", kept in {found.export}" if found.export else "")
    figures = ", ".join(f"{name} {value:.4g}" for name, value in found.metrics.items()) or "no number"
    line = Judged(found.member, found.step, f"{found.member} evaluated step {found.step}: {figures}", reason)
    told: tuple[Instruction, ...] = (line, replace(to, standing=after))
    why = exhausted(after)
    return replace(state, standing=after), (*told, StopEarly(why)) if why else told


def _without(state: State, name: str) -> State:
    return replace(state, members={key: one for key, one in state.members.items() if key != name})
