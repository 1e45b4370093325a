"""Evaluates the checkpoints of a run as they appear, keeps the best model, and says what it found."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core.runs.evaluation import Goal, parse
from shoal.errors import (
    BadEvaluation,
    CheckpointDamaged,
    EvaluatorDiffers,
    ModelMismatch,
    NoCheckpoint,
    NothingToEvaluate,
    StoreUnusable,
)
from shoal.wire import member_messages as messages
from shoal.worker.evaluation.evaluator_session import EvaluatorSession
from shoal.worker.session import output_upload
from shoal.worker.session.session import MemberExit
from shoal.worker.training.metrics import number_of
from shoal.worker.training.training_state import TrainingState

LOOK_S = 5.0
UNSEEN_S = 60.0
TRIES = 5

Write = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """What a script asked for: how to score its model, what is best, and what to do about it."""

    score: Callable[[], Any]
    best: str = ""
    goal: Goal | None = None
    patience: int | None = None
    export: str = ""


def wish(
    score: Callable[[], Any], best: str | None, patience: int | None, export: str | os.PathLike[str] | None
) -> EvaluationRequest:
    """Check what a script asks for; every process does, so that a mistake is found before the training."""
    if not callable(score):
        raise BadEvaluation(f"a {type(score).__name__} cannot evaluate a model", do="pass a function of no arguments")
    goal = parse(best or "")
    if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int) or patience < 1):
        raise BadEvaluation(f"patience cannot be {patience!r}", why="it is a number of evaluations, 1 at least")
    if goal is None and (patience is not None or export is not None):
        what = "patience" if patience is not None else "export"
        raise BadEvaluation(
            f"{what} was given, but not what is best", do='write best="max:accuracy" or best="min:loss"'
        )
    return EvaluationRequest(score, best or "", goal, patience, os.fspath(export) if export is not None else "")


def follow(
    session: EvaluatorSession, keeper: TrainingState, asked: EvaluationRequest | None, write: Write
) -> MemberExit:
    """Evaluate each new checkpoint until nobody trains any more; what the process then ends with.

    `write(path)` writes the model that is loaded. If several checkpoints came meanwhile, only the newest counts.
    """
    if asked is None:
        raise NothingToEvaluate(
            "this run has an evaluator, but its script does not say how to evaluate",
            do="call run.evaluate(fn) before the loop, or leave --evaluator out",
        )
    line = session.line
    done: tuple[int, int] | None = None
    step, best = line.standing().step, _best(line.standing(), asked)
    while True:
        session.set_phase("waiting for a checkpoint")
        trained = line.trained
        found = keeper.newest()
        if found is not None and found != done and found[0] != step:
            step, best = _evaluate(session, keeper, asked, write, best)
            done = found
            continue
        if trained:
            line.wait_until_heard()
            return line.goodbye(0, "the run has finished, and its last checkpoint is evaluated")
        _check_seen(line.checkpoint, found, keeper.where)
        line.pause(LOOK_S)


def _best(standing: messages.EvaluationStatusMsg, asked: EvaluationRequest) -> float | None:
    """What an evaluator before us found, if it asked the same."""
    return standing.best_value if standing.best == asked.best else None


def _evaluate(
    session: EvaluatorSession, keeper: TrainingState, asked: EvaluationRequest, write: Write, best: float | None
) -> tuple[int, float | None]:
    """Evaluate the newest checkpoint; returns its step, and the best value so far."""
    session.set_phase("loading")
    step = _load(session, keeper)
    session.set_phase("evaluating")
    numbers = numbers_of(asked.score(), asked.goal)
    finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
    for name in numbers.keys() - finite.keys():
        sys.stderr.write(f"shoal: {session.me}: {name} of step {step} is no number\n")
    value = finite.get(asked.goal.metric) if asked.goal is not None else None
    better = asked.goal is not None and value is not None and asked.goal.better(value, best)
    if better and asked.export:
        session.set_phase("exporting")
        export(asked.export, write)
        output_upload.bring_back(session.environment, asked.export)
    kept = asked.export if better else ""
    session.line.evaluated(messages.EvaluatedMsg(step, finite, asked.best, asked.patience, kept))
    return step, value if better else best


def _load(session: EvaluatorSession, keeper: TrainingState) -> int:
    """Load the newest checkpoint; one that is pruned while we read it has made room for another."""
    for left in reversed(range(TRIES)):
        try:
            step = keeper.restore()
        except CheckpointDamaged:
            if not left:
                raise
            step = None
        except ModelMismatch as error:
            raise EvaluatorDiffers(
                f"the evaluator has another model than the run: {error.what}",
                why=error.why,
                do="let the script build the same model, optimizer and schedulers in every process",
            ) from error
        if step is not None:
            session.at(step)
            return step
        session.line.pause(1.0)
    raise NoCheckpoint(f"the checkpoints in {keeper.where} are gone", do="see who else deletes files there")


def _check_seen(told: tuple[int, float] | None, found: tuple[int, int] | None, where: str) -> None:
    """A checkpoint that was written must be there to be read, or somebody will wait for nothing."""
    if told is None or time.monotonic() - told[1] < UNSEEN_S or (found is not None and found[0] >= told[0]):
        return
    raise NoCheckpoint(
        f"the evaluator does not find the checkpoint of step {told[0]}",
        where=where,
        why="it was written on a machine that does not share this place",
        do="set checkpoint.to to a place that all machines see",
    )


def numbers_of(result: Any, goal: Goal | None) -> dict[str, float]:
    """What an evaluation returned, as numbers by name."""
    do = 'return a dict of numbers by name, such as {"accuracy": 0.9}'
    if not isinstance(result, Mapping):
        raise BadEvaluation(f"the evaluation returned a {type(result).__name__}, not a dict", do=do)
    numbers: dict[str, float] = {}
    for name, value in result.items():
        try:
            numbers[str(name)] = number_of(value)
        except TypeError as error:
            kind = type(value).__name__
            raise BadEvaluation(f"{name} is a {kind}, not a number", why=str(error), do=do) from error
    if not numbers:
        raise BadEvaluation("the evaluation returned an empty dict", do=do)
    if goal is not None and goal.metric not in numbers:
        raise BadEvaluation(
            f"{goal.metric} should decide what is best, but the evaluation did not return it",
            why=f"it returned {', '.join(numbers)}",
            do="name one of these in best=",
        )
    return numbers


def export(path: str, write: Write) -> None:
    """Put the model that is loaded in place of the one before, whole or not at all."""
    stem, suffix = os.path.splitext(path)
    part = f"{stem}.{os.getpid()}.part{suffix}"
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        write(part)
        os.replace(part, path)
    # PyTorch raises the latter for a disk that is full.
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise StoreUnusable(
            f"the best model could not be written to {path}", why=str(error), do="give export= another path"
        ) from error
