"""An evaluator beside parameter servers reads their sharded checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.process.evaluator.evaluated_run import EVALUATOR, evaluated_run

pytestmark = [pytest.mark.process, pytest.mark.roles, pytest.mark.timeout(600)]

SERVED = ("sync=stale:2", "servers=2", "checkpoint.every_steps=10", "backoff_s=0.05")


def test_state_on_servers_is_evaluated_and_the_best_is_kept(tmp_path: Path) -> None:
    plan = {"epochs": 10, "hold": 3, "best": "max:peak", "peak": 30, "export": True}
    with evaluated_run(tmp_path, "2", *SERVED, **plan) as run:
        run.finish()
        evaluations, scored = run.evaluations(), run.scored()
        assert len(evaluations) >= 3
        assert [record["step"] for record in evaluations] == sorted({record["step"] for record in evaluations})
        steps = [record["step"] for record in evaluations]
        assert [record["step"] for record in scored] == steps
        assert evaluations[-1]["step"] == 80, "the end of the training was not evaluated"
        assert {record["sum"] for record in run.events_of("done")} == {scored[-1]["sum"]}, "not the final state"
        assert evaluations[-1]["metrics"]["loss"] < evaluations[0]["metrics"]["loss"]
        best = max(evaluations, key=lambda record: record["metrics"]["peak"])["step"]
        kept = torch.load(run.records / "best.pt", weights_only=True)
        assert float(sum(tensor.double().sum() for tensor in kept.values())) in [
            record["sum"] for record in scored if record["step"] == best
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
        assert {record["sum"] for record in run.events_of("done")} == {run.scored()[-1]["sum"]}
        assert {record["pid"] for record in run.scored()} == {before}, "the evaluator was started again"


def test_different_model_harms_the_evaluator_only(tmp_path: Path) -> None:
    with evaluated_run(tmp_path, "1", *SERVED, "restarts.user=0", epochs=3, bad="model") as run:
        run.finish()
        assert "error[S320] the evaluator's model differs from the run's" in run.output
        assert "only in this model: body.weight float32[1, 9]; only in the checkpoint: float32[1, 8]" in run.output
        assert "training continues without its evaluator" in run.output
        assert len(run.events_of("done")) == 1
