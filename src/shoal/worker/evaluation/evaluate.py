"""Evaluation of a run's checkpoints as they appear.

An evaluator runs the same script as the trainers up to its loop, so it holds the same model, and then follows the
checkpoints instead of training. It is in no world, trainers never wait for it, and when it dies its agent starts it
again. The cycle is: find the newest checkpoint, load it, call the script's function, compare the score with the best so
far, export the model if it is better, and report the result to the coordinator.

- Only the newest checkpoint counts: those that were overtaken while the evaluator was busy are skipped.
- The best score lives in the coordinator's journal, so a restarted evaluator continues the comparison. Scores under
  another `best=` do not compare and are ignored.
- Early stopping is decided by the coordinator, which counts the evaluations without improvement (`patience`).
- Reports are kept, and repeated on every reconnect, until the coordinator has confirmed them (see `EvaluatorClient`).
- When training has finished, the trainers leave a final checkpoint (`TrainingState.at_end`), and the evaluator exits
  once that is evaluated and confirmed. "Finished" is read before the newest checkpoint is looked up: in the other order
  the final checkpoint could appear in between and be missed.
- A checkpoint may be pruned while it is read; then a newer one exists, and loading is retried a few times. A checkpoint
  that was announced but stays invisible means that the machines share no storage, which is an error.
"""

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
from shoal.worker.training.metrics import to_float
from shoal.worker.training.training_state import TrainingState

POLL_S = 5.0
VISIBLE_WITHIN_S = 60.0
LOAD_ATTEMPTS = 5

Write = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """Arguments of `run.evaluate`: how to score the model, which score is best, and what to do with it."""

    score: Callable[[], Any]
    best: str = ""
    goal: Goal | None = None
    patience: int | None = None
    export: str = ""


def evaluation_request(
    score: Callable[[], Any], best: str | None, patience: int | None, export: str | os.PathLike[str] | None
) -> EvaluationRequest:
    """Check the arguments of `run.evaluate`; raise BadEvaluation if they are invalid.

    Trainers check them too, so that a mistake is found before the training and not after it.
    """
    if not callable(score):
        raise BadEvaluation(f"a {type(score).__name__} cannot evaluate a model", do="pass a function of no arguments")
    goal = parse(best or "")
    if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int) or patience < 1):
        raise BadEvaluation(f"invalid patience {patience!r}", why="expected a number of evaluations, at least 1")
    if goal is None and (patience is not None or export is not None):
        argument = "patience" if patience is not None else "export"
        raise BadEvaluation(f"{argument}= requires best=", do='write best="max:accuracy" or best="min:loss"')
    return EvaluationRequest(score, best or "", goal, patience, os.fspath(export) if export is not None else "")


def evaluate_checkpoints(
    session: EvaluatorSession, training_state: TrainingState, request: EvaluationRequest | None, write: Write
) -> MemberExit:
    """Evaluate each new checkpoint until training has finished; return what the process exits with.

    `write(path)` must write the model that is loaded.
    """
    if request is None:
        raise NothingToEvaluate(
            "this run has an evaluator, but its script does not say how to evaluate",
            do="call run.evaluate(fn) before the loop, or leave --evaluator out",
        )
    client = session.client
    evaluated: tuple[int, int] | None = None
    step, best = client.evaluation_status().step, _earlier_best(client.evaluation_status(), request)
    while True:
        session.set_phase("waiting for a checkpoint")
        training_finished = client.training_finished
        newest = training_state.newest()
        if newest is not None and newest != evaluated and newest[0] != step:
            step, best = _evaluate_newest(session, training_state, request, write, best)
            evaluated = newest
            continue
        if training_finished:
            client.wait_until_confirmed()
            return client.exit(0, "the run has finished and its last checkpoint is evaluated")
        _check_visible(client.announced, newest, training_state.directory)
        client.pause(POLL_S)


def _earlier_best(status: messages.EvaluationStatusMsg, request: EvaluationRequest) -> float | None:
    """Return the best score of an earlier evaluator, if it used the same goal."""
    return status.best_value if status.best == request.best else None


def _evaluate_newest(
    session: EvaluatorSession,
    training_state: TrainingState,
    request: EvaluationRequest,
    write: Write,
    best: float | None,
) -> tuple[int, float | None]:
    """Evaluate the newest checkpoint; return its step and the best score so far."""
    session.set_phase("loading")
    step = _load_newest(session, training_state)
    session.set_phase("evaluating")
    scores = check_scores(request.score(), request.goal)
    finite = {name: value for name, value in scores.items() if math.isfinite(value)}
    for name in scores.keys() - finite.keys():
        sys.stderr.write(f"shoal: {session.me}: {name} of step {step} is {scores[name]}\n")
    value = finite.get(request.goal.metric) if request.goal is not None else None
    better = request.goal is not None and value is not None and request.goal.is_better(value, best)
    if better and request.export:
        session.set_phase("exporting")
        export_model(request.export, write)
        output_upload.upload_output(session.environment, request.export)
    exported = request.export if better else ""
    session.client.report(messages.EvaluatedMsg(step, finite, request.best, request.patience, exported))
    return step, value if better else best


def _load_newest(session: EvaluatorSession, training_state: TrainingState) -> int:
    """Load the newest checkpoint and return its step; retry if it is pruned while it is read."""
    for remaining in reversed(range(LOAD_ATTEMPTS)):
        try:
            step = training_state.restore()
        except CheckpointDamaged:
            if not remaining:
                raise
            step = None
        except ModelMismatch as error:
            raise EvaluatorDiffers(
                f"the evaluator's model differs from the run's: {error.what}",
                why=error.why,
                do="let the script build the same model, optimizer and schedulers in every process",
            ) from error
        if step is not None:
            session.loaded(step)
            return step
        session.client.pause(1.0)
    raise NoCheckpoint(
        f"no checkpoint left in {training_state.directory}", do="check whether another program deletes files there"
    )


def _check_visible(announced: tuple[int, float] | None, newest: tuple[int, int] | None, directory: str) -> None:
    """Raise NoCheckpoint if the announced checkpoint, as (step, time), did not become visible in time."""
    if announced is None:
        return
    step, announced_at = announced
    if time.monotonic() - announced_at < VISIBLE_WITHIN_S or (newest is not None and newest[0] >= step):
        return
    raise NoCheckpoint(
        f"the evaluator cannot see the checkpoint of step {step}",
        where=directory,
        why="it was written on a machine that does not share this directory",
        do="set checkpoint.to to a location that all machines see",
    )


def check_scores(result: Any, goal: Goal | None) -> dict[str, float]:
    """Return the result of an evaluation as floats by name; raise BadEvaluation if it is anything else."""
    do = 'return a dict of numbers by name, such as {"accuracy": 0.9}'
    if not isinstance(result, Mapping):
        raise BadEvaluation(f"the evaluation returned a {type(result).__name__}, not a dict", do=do)
    scores: dict[str, float] = {}
    for name, value in result.items():
        try:
            scores[str(name)] = to_float(value)
        except TypeError as error:
            kind = type(value).__name__
            raise BadEvaluation(f"{name} is a {kind}, not a number", why=str(error), do=do) from error
    if not scores:
        raise BadEvaluation("the evaluation returned an empty dict", do=do)
    if goal is not None and goal.metric not in scores:
        raise BadEvaluation(
            f"the evaluation did not return {goal.metric}, which best= names",
            why=f"it returned {', '.join(scores)}",
            do="name one of these in best=",
        )
    return scores


def export_model(path: str, write: Write) -> None:
    """Replace the file at `path` with the loaded model, atomically; raise StoreUnusable if it cannot be written."""
    stem, suffix = os.path.splitext(path)
    part = f"{stem}.{os.getpid()}.part{suffix}"
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        write(part)
        os.replace(part, path)
    # PyTorch raises RuntimeError when the disk is full.
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise StoreUnusable(
            f"the best model could not be written to {path}", why=str(error), do="give export= another path"
        ) from error
