"""An evaluator beside servers: it reads the checkpoints that they write in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.process.evaluator.evaluated_run import EVALUATOR, EvaluatedRun, evaluated_run

pytestmark = [pytest.mark.process, pytest.mark.roles, pytest.mark.timeout(600)]

SERVED = ("sync=stale:2", "servers=2", "checkpoint.every_steps=10", "backoff_s=0.05")


def of(run: EvaluatedRun, event: str) -> list[dict[str, Any]]:
    return [one for one in run.events() if one["event"] == event]


def test_state_on_servers_is_evaluated_and_the_best_is_kept(tmp_path: Path) -> None:
    plan = {"epochs": 10, "hold": 3, "best": "max:peak", "peak": 30, "export": True}
    with evaluated_run(tmp_path, "2", *SERVED, **plan) as run:
        run.finish()
        found, scored = run.evaluations(), run.scored()
        assert len(found) >= 3
        assert [one["step"] for one in found] == sorted({one["step"] for one in found})
        assert [one["step"] for one in scored] == [one["step"] for one in found]
        assert found[-1]["step"] == 80, "the end of the training was not evaluated"
        assert {one["sum"] for one in of(run, "done")} == {scored[-1]["sum"]}, "not what the servers held at the end"
        assert found[-1]["metrics"]["loss"] < found[0]["metrics"]["loss"]
        best = max(found, key=lambda one: one["metrics"]["peak"])["step"]
        kept = torch.load(run.records / "best.pt", weights_only=True)
        assert float(sum(tensor.double().sum() for tensor in kept.values())) in [
            one["sum"] for one in scored if one["step"] == best
        ]
        assert run.shoal("status", run.run_id())["evaluation"]["best_step"] == best < 80


def test_run_with_servers_stops_early_with_success(tmp_path: Path) -> None:
    plan = {"epochs": 2500, "pause_s": 0.01, "hold": 6, "best": "max:peak", "patience": 2, "peak": 20}
    with evaluated_run(tmp_path, "2", *SERVED, **plan) as run:
        run.finish()
        view = run.shoal("status", run.run_id())
        assert (view["status"], view["exit_code"]) == ("done", 0)
        assert view["reason"].startswith("stopped early: 2 evaluations did not improve on peak")
        assert view["step"] < 20_000


def test_loss_of_a_server_loses_no_evaluation(tmp_path: Path) -> None:
    with evaluated_run(tmp_path, "1", *SERVED, "restarts.infrastructure=10", epochs=10, hold=1, gate=40) as run:
        run.until(lambda: len(run.evaluations()) >= 1, "an evaluation")
        before = run.pids()[EVALUATOR]
        run.kill("local/server-0")
        (run.records / "go").touch()
        run.finish()
        assert run.evaluations()[-1]["step"] == 80
        assert {one["sum"] for one in of(run, "done")} == {run.scored()[-1]["sum"]}
        assert {one["pid"] for one in run.scored()} == {before}, "the evaluator was started again"


def test_different_model_harms_the_evaluator_only(tmp_path: Path) -> None:
    with evaluated_run(tmp_path, "1", *SERVED, "restarts.user=0", epochs=3, bad="model") as run:
        run.finish()
        assert "error[S320] the evaluator's model differs from the run's" in run.output
        assert "only here: body.weight float32[1, 9]; only there: float32[1, 8]" in run.output
        assert "training continues without its evaluator" in run.output
        assert len(of(run, "done")) == 1
