"""`shoal.run` with an evaluator that dies, is late or fails: the training continues."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.process, pytest.mark.roles, pytest.mark.timeout(600)]

# `evaluate` replaces the experiment's own evaluation, which it gets as its first argument.
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
    report(status=run.status(), exit_code=view.exit_code, step=view.step, losses=view.losses, story=str(run.story()),
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
    # The trainer writes it at its end, so the first evaluation takes longer than all of the training.
    until = time.monotonic() + 60
    while not os.path.exists("model.pt") and time.monotonic() < until:
        time.sleep(0.05)
    print("late", os.path.exists("model.pt"), flush=True)
    return own(model) | {"odd": float("nan")}
"""


def ran(stage: Any, evaluate: str, *, differs: bool = False, export: str | None = None, settings: str = "") -> Any:
    text = PROGRAM.format(evaluate=evaluate, differs=differs, export=export, settings=settings)
    # Evaluators run at low priority, also beside other tests.
    (report,) = stage.finish(stage.begin(text), timeout_s=300)
    assert (report["status"], report["exit_code"], report["step"]) == ("done", 0, 9), report["story"]
    assert report["losses"] == 0, "a trainer was lost"
    assert "model.pt" in report["files"], "the training did not finish"
    return report


def test_killed_evaluator_is_restarted_and_evaluates_the_last_checkpoint(stage: Any) -> None:
    report = ran(stage, DIES_ONCE)
    assert "died" in report["files"]
    assert report["evaluated"] == 9
    assert "worst" in report["metrics"]
    assert report["story"].count("local/evaluator-0 runs as process") == 2


def test_run_waits_for_the_last_evaluation_and_reports_a_metric_that_is_not_finite(stage: Any) -> None:
    report = ran(stage, LATE, export="best.pt")
    assert "late True" in report["logs"]
    assert report["evaluated"] == 9
    assert "best.pt" in report["files"]
    assert "waiting for the evaluator" in report["story"]
    assert "odd of step 9 is" in report["logs"]
    assert "worst" in report["metrics"]
    assert "odd" not in report["metrics"]


@pytest.mark.parametrize(
    ("evaluate", "options", "message"),
    [
        (AS_IT_IS, {"differs": True}, "error[S320] the evaluator's model differs from the run's"),
        ("def evaluate(own, model): raise ValueError('no such data')", {}, "ValueError: no such data"),
        ("def evaluate(own, model): return {'worst': '0.5'}", {}, "error[S321] worst is a str, not a number"),
        (AS_IT_IS, {"export": "/dev/null/best.pt"}, "error[S502] the best model could not be written to /dev/null"),
    ],
)
def test_training_continues_without_an_evaluator_that_fails(
    stage: Any, evaluate: str, options: dict[str, Any], message: str
) -> None:
    report = ran(stage, evaluate, settings="restarts_user=0", **options)
    assert report["evaluated"] is None
    assert "training continues without its evaluator" in report["story"]
    assert message in report["story"], "the reason is missing"
