"""An evaluator beside the trainers: it reports scores, keeps the best model and never disturbs training."""

from __future__ import annotations

import signal
import urllib.request
from pathlib import Path

import pytest
import torch
from tests.process.evaluator.evaluated_run import EVALUATOR, EvaluatedRun, evaluated_run

pytestmark = [pytest.mark.process, pytest.mark.roles, pytest.mark.timeout(600)]

OFTEN = "checkpoint.every_steps=10"


def test_each_new_checkpoint_is_evaluated_and_reported(tmp_path: Path) -> None:
    with evaluated_run(tmp_path, "2", OFTEN, epochs=10, hold=3, gate=60, best="min:loss") as run:
        run.until(lambda: len(run.evaluations()) >= 2, "two evaluations")
        metrics = scrape(run)
        view = run.shoal("status", run.run_id())
        (run.records / "go").touch()
        run.finish()
        evaluations = run.evaluations()
        assert [record["step"] for record in evaluations] == sorted({record["step"] for record in evaluations})
        assert evaluations[-1]["step"] == 80, "the end of the training was not evaluated"
        assert all(record["metrics"]["step"] == record["step"] for record in evaluations), "another state was evaluated"
        assert [record["seen"] for record in run.scored()] == [record["step"] for record in run.scored()]
        assert not any(record["training"] for record in run.scored())
        assert evaluations[-1]["metrics"]["loss"] < evaluations[0]["metrics"]["loss"]
        assert view["evaluation"]["metrics"].keys() == {"loss", "step", "peak"}
        assert [m["status"] for m in view["members"] if m["role"] == "evaluator"] == ["evaluating"]
        assert 'shoal_run_evaluation{metric="loss"' in metrics
        assert "shoal_run_evaluated_step{" in metrics
        assert f"evaluated step {evaluations[0]['step']}: loss" in run.output
        assert any("evaluated step 80" in line["text"] for line in run.shoal("why", run.run_id()))
        assert "evaluated   step 80: loss" in run.output, "the summary lacks the evaluation"


def test_evaluator_is_in_no_world_takes_no_slot_and_has_low_priority(tmp_path: Path) -> None:
    with evaluated_run(tmp_path, "2:2", OFTEN, epochs=6) as run:
        run.finish()
        assert {record["nice"] for record in run.scored()} == {19}
        assert all(record["group"].endswith("nice 19") or not record["group"] for record in run.scored())
        assert {commit["size"] for commit in run.commits()} == {2}
        assert {e["member"] for e in run.events() if e["event"] == "done"} == {"local/0", "local/1"}
        assert len(run.worlds()) == 1
        assert EVALUATOR not in str([e for e in run.journal() if e["kind"] in ("MemberReady", "WorldEntered")])


@pytest.mark.parametrize("plan", [{}, {"leaves": "local/1"}], ids=["all leave", "one leaves"])
def test_state_at_which_a_script_left_its_loop_is_evaluated(tmp_path: Path, plan: dict[str, str]) -> None:
    with evaluated_run(tmp_path, "2:2", epochs=6, leave_at=17, **plan) as run:
        run.finish()
        assert [record["step"] for record in run.events_of("done")] == [17, 17]
        assert run.evaluations()[-1]["step"] == 17


def test_run_without_improvement_stops_early_with_success(tmp_path: Path) -> None:
    with evaluated_run(
        tmp_path, "2", OFTEN, epochs=2500, pause_s=0.01, hold=6, best="max:peak", patience=2, peak=20
    ) as run:
        run.finish()
        assert run.step() < 20_000 - 1, "the run was not stopped early"
        left = [e["fields"] for e in run.journal() if e["kind"] == "MemberLeft" and e["fields"]["member"] != EVALUATOR]
        assert len(left) == 2
        assert left[0]["step"] == left[1]["step"], "members stopped after different steps"
        assert "did not improve on peak" in run.output
        view = run.shoal("status", run.run_id())
        assert (view["status"], view["exit_code"]) == ("done", 0)
        assert view["reason"].startswith("stopped early: 2 evaluations did not improve on peak")
        assert view["evaluation"]["without"] == 2


def test_best_model_is_kept_instead_of_the_last(tmp_path: Path) -> None:
    with evaluated_run(tmp_path, "1", OFTEN, epochs=10, hold=4, best="max:peak", peak=30, export=True) as run:
        run.finish()
        best = max(run.evaluations(), key=lambda record: record["metrics"]["peak"])
        assert int(torch.load(run.records / "best.pt", weights_only=True)["seen"]) == best["step"] < 80
        assert not list(run.records.glob("*.part*"))
        assert str(run.records / "best.pt") in run.output


def test_death_of_the_evaluator_disturbs_no_trainer_and_keeps_the_best(tmp_path: Path) -> None:
    calm = ("restarts.infrastructure=10", "backoff_s=0.05")
    plan = {"epochs": 25, "hold": 6, "gate": 60, "best": "max:peak", "peak": 10, "export": True}
    with evaluated_run(tmp_path, "2", OFTEN, *calm, **plan) as run:
        run.until(lambda: len(run.evaluations()) >= 2, "two evaluations")
        before, best = run.pids()[EVALUATOR], run.evaluations()[0]
        run.kill(EVALUATOR)
        run.until(lambda: run.pids().get(EVALUATOR, before) != before, "another evaluator")
        (run.records / "go").touch()
        seen = len(run.evaluations())
        run.until(lambda: len(run.evaluations()) > seen, "it to go on")
        run.finish()
        assert len(run.worlds()) == 1, "the death of the evaluator changed the world"
        assert {e["pid"] for e in run.commits()} == {e["pid"] for e in run.events() if e["event"] == "done"}
        assert run.evaluations()[-1]["step"] == 200
        steps = [record["step"] for record in run.evaluations()]
        assert steps == sorted(set(steps)), "a checkpoint was counted twice"
        view = run.shoal("status", run.run_id())
        assert view["evaluation"]["best_step"] == best["step"]
        assert view["losses"] == 0
        assert int(torch.load(run.records / "best.pt", weights_only=True)["seen"]) == best["step"]


def test_evaluator_that_dies_after_training_restarts_to_evaluate_the_end(tmp_path: Path) -> None:
    with evaluated_run(tmp_path, "1", "backoff_s=0.05", epochs=3, score_waits=True) as run:
        run.until(lambda: len(run.events()) and run.step() == 23, "the last step")
        run.until(lambda: "waiting for the evaluator" in run.output, "the trainers to be gone")
        run.until(lambda: EVALUATOR in run.pids(), "the evaluator")
        run.kill(EVALUATOR)
        (run.records / "go").touch()
        run.finish()
        assert [record["step"] for record in run.evaluations()] == [24]


def test_hung_evaluator_does_not_delay_training(tmp_path: Path) -> None:
    with evaluated_run(tmp_path, "2", OFTEN, epochs=6, gate=20) as run:
        run.until(lambda: EVALUATOR in run.pids(), "the evaluator")
        run.kill(EVALUATOR, signal.SIGSTOP)
        (run.records / "go").touch()
        run.until(lambda: len([e for e in run.events() if e["event"] == "done"]) == 2, "the trainers to be done")
        run.kill(EVALUATOR, signal.SIGCONT)
        run.finish()
        assert run.evaluations()[-1]["step"] == 48
        assert len(run.worlds()) == 1


def test_end_is_evaluated_without_checkpoint_settings(tmp_path: Path) -> None:
    with evaluated_run(tmp_path, "1", epochs=2) as run:
        run.finish()
        assert [record["step"] for record in run.evaluations()] == [16]


def test_restarted_coordinator_knows_the_best_score(tmp_path: Path) -> None:
    with evaluated_run(tmp_path, "1", OFTEN, epochs=25, hold=6, gate=60, best="max:peak", peak=10) as run:
        run.until(lambda: len(run.evaluations()) >= 2, "two evaluations")
        first = run.evaluations()[0]["step"]
        run.service_process("coordinator").kill()
        (run.records / "go").touch()
        seen = len(run.evaluations())
        run.until(lambda: len(run.evaluations()) > seen, "it to go on")
        run.finish()
        assert run.shoal("status", run.run_id())["evaluation"]["best_step"] == first


@pytest.mark.parametrize(
    ("bad", "code", "words"),
    [
        ("unasked", "S322", "does not say how to evaluate"),
        ("text", "S321", "returned a str, not a dict"),
        ("word", "S321", "loss is a str, not a number"),
        ("model", "S320", "body.weight"),
    ],
)
def test_error_in_the_evaluation_harms_the_evaluator_only(tmp_path: Path, bad: str, code: str, words: str) -> None:
    with evaluated_run(tmp_path, "1", "checkpoint.every_steps=5", "restarts.user=0", epochs=3, bad=bad) as run:
        run.finish()
        assert run.step() == 23
        assert code in run.output
        assert words in run.output
        assert "training continues without its evaluator" in run.output
        assert len(run.worlds()) == 1


def test_resumed_run_continues_its_evaluation(tmp_path: Path) -> None:
    plan = {"epochs": 25, "hold": 6, "gate": 60, "pause_s": 0.05, "best": "max:peak", "peak": 10}
    with evaluated_run(tmp_path, "1", OFTEN, **plan) as run:
        run.until(lambda: len(run.evaluations()) >= 2, "two evaluations")
        stopping = run.start("stop", run.run_id())
        run.until(lambda: run.journal("UserStopRequested"), "the coordinator to receive the stop")
        (run.records / "go").touch()
        run.finish(exit_code=75)
        assert stopping.wait(60) == 0
        first = run.evaluations()[0]["step"]
        run.process = run.start("resume", run.run_id())
        run.finish()
        assert run.evaluations()[-1]["step"] == 200
        assert run.shoal("status", run.run_id())["evaluation"]["best_step"] == first


def test_local_training_is_evaluated(tmp_path: Path) -> None:
    with evaluated_run(tmp_path, "2", "sync=local:4", "checkpoint.every_steps=2", epochs=6) as run:
        run.finish()
        assert len(run.evaluations()) >= 1
        assert len(run.worlds()) == 1


def test_nan_score_is_no_improvement(tmp_path: Path) -> None:
    with evaluated_run(
        tmp_path, "1", OFTEN, epochs=2500, pause_s=0.01, hold=6, bad="nan", best="max:peak", patience=2
    ) as run:
        run.finish()
        assert "stopped early: peak was not a number in 2 evaluations" in run.output


def scrape(run: EvaluatedRun) -> str:
    directory = next(run.home.glob("coordinators/*"))
    token = (directory / "token").read_text().split()[0]
    request = urllib.request.Request(f"{(directory / 'url').read_text().strip()}/metrics")
    request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def test_unmodified_script_with_evaluator_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with evaluated_run(tmp_path) as run:
        refused = run.start("run", "--compat", "torchrun", "--evaluator", str(run.script))
        assert refused.wait(60) == 3
        assert "error[S123] an unmodified script (--compat torchrun) cannot have an evaluator" in run.output
        assert "leave --evaluator out and evaluate in the script" in run.output
        assert "where  --evaluator" in run.output, "only the coordinator noticed"
        run.finish()
