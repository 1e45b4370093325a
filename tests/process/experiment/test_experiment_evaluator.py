"""`shoal.run` with an evaluator that dies, comes late, or cannot do what it should: the training goes on."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.process, pytest.mark.roles, pytest.mark.timeout(400)]

# `evaluate` is what the evaluator does in the place of the experiment's own evaluation, which it is given.
PROGRAM = """
import dataclasses, os, signal, time

{evaluate}

def evaluated():
    import torch

    made = experiment_fn()
    if {differs} and os.environ.get("SHOAL_ROLE") == "evaluator":
        model = torch.nn.Linear(5, 1)
        made = dataclasses.replace(made, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    own = made.evaluation
    best = dict(best="min:worst", export={export!r})
    return dataclasses.replace(made, evaluation=lambda model: evaluate(own, model), **best)

if __name__ == "__main__":
    roles = {{"trainer": shoal.Role(count=1), "evaluator": shoal.Role()}}
    run = shoal.run(evaluated, roles=roles, checkpoint_every_steps=4, backoff_s=0.05, {settings})
    view = run.wait(280)
    found = view.evaluation
    tell(status=run.status(), exit_code=view.exit_code, step=view.step, losses=view.losses, story=str(run.story()),
         logs=run.logs(), files=sorted(path.name for path in run.directory.iterdir()), worlds=view.world or 0,
         evaluated=found.step if found else None, best=found.best_step if found else None,
         metrics=run.metrics())
"""

AS_IT_IS = "def evaluate(own, model): return own(model)"

DIES_ONCE = """
def evaluate(own, model):
    if not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return own(model)
"""

LATE = """
def evaluate(own, model):
    # The trainer writes it when it is done; the first evaluation takes longer than all of the training.
    until = time.monotonic() + 60
    while not os.path.exists("model.pt") and time.monotonic() < until:
        time.sleep(0.05)
    print("late", os.path.exists("model.pt"), flush=True)
    return own(model) | {"odd": float("nan")}
"""


def ran(stage: Any, evaluate: str, *, differs: bool = False, export: str | None = None, settings: str = "") -> Any:
    text = PROGRAM.format(evaluate=evaluate, differs=differs, export=export, settings=settings)
    # Evaluators give way to everybody, other tests included.
    (told,) = stage.finish(stage.begin(text), patience_s=300)
    assert (told["status"], told["exit_code"], told["step"]) == ("done", 0, 9), told["story"]
    assert told["losses"] == 0, "a trainer was lost"
    assert "model.pt" in told["files"], "the training did not come to its end"
    return told


def test_an_evaluator_that_is_killed_comes_back_and_scores_the_end(stage: Any) -> None:
    told = ran(stage, DIES_ONCE)
    assert "died" in told["files"]
    assert told["evaluated"] == 9
    assert "worst" in told["metrics"]
    assert told["story"].count("local/evaluator-0 runs as process") == 2


def test_a_run_waits_for_an_evaluator_that_has_not_scored_its_last_checkpoint_and_tells_of_nan(stage: Any) -> None:
    told = ran(stage, LATE, export="best.pt")
    assert "late True" in told["logs"]
    assert told["evaluated"] == 9
    assert "best.pt" in told["files"]
    assert "only the evaluator is waited for" in told["story"]
    assert "odd of step 9 is no number" in told["logs"]
    assert "worst" in told["metrics"]
    assert "odd" not in told["metrics"]


@pytest.mark.parametrize(
    ("evaluate", "how", "said"),
    [
        (AS_IT_IS, {"differs": True}, "error[S320] the evaluator's model differs from the run's"),
        ("def evaluate(own, model): raise ValueError('no such data')", {}, "ValueError: no such data"),
        ("def evaluate(own, model): return {'worst': '0.5'}", {}, "error[S321] worst is a str, not a number"),
        (AS_IT_IS, {"export": "/dev/null/best.pt"}, "error[S502] the best model could not be written to /dev/null"),
    ],
)
def test_whatever_the_evaluator_cannot_do_the_training_goes_on(
    stage: Any, evaluate: str, how: dict[str, Any], said: str
) -> None:
    told = ran(stage, evaluate, settings="restarts_user=0", **how)
    assert told["evaluated"] is None
    assert "the training goes on without its evaluator" in told["story"]
    assert said in told["story"], "the reason is not told"
