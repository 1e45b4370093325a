"""What `shoal scale` advises for a run that has ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.views import run_view

from shoal.cli.main import run as shoal_cli
from shoal.cli.verbs.scale import ended_advice
from shoal.launch.coordinator_target import CoordinatorTarget

LOCAL = CoordinatorTarget(Path("home"))
REMOTE = CoordinatorTarget(Path("home"), "http://head:29300", "token")


@pytest.mark.parametrize("status", ["stopped", "failed", "resumable"])
def test_unfinished_run_is_to_be_resumed(status: str) -> None:
    view = run_view(status=status)
    assert ended_advice(view, "1:3", None, LOCAL) == "shoal resume train-7f3k -n 1:3"
    assert ended_advice(view, "1:3", 5.0, REMOTE) == (
        "shoal resume train-7f3k -n 1:3 --budget 5 --url http://head:29300 --token-file token"
    )


def test_finished_run_cannot_be_resumed_and_needs_a_new_run() -> None:
    view = run_view(status="done", argv=("train.py", "--name", "my run"))
    assert ended_advice(view, "1:3", None, LOCAL) == "start a new run: shoal run -n 1:3 train.py --name 'my run'"


@pytest.mark.parametrize("amount", ["nan", "inf", "-1", "0"])
@pytest.mark.parametrize("verb", ["scale", "resume"])
def test_invalid_budget_is_rejected(capsys: pytest.CaptureFixture[str], verb: str, amount: str) -> None:
    assert shoal_cli([verb, "train", "--budget", amount]) == 3
    assert f"error[S150] invalid budget {amount}" in capsys.readouterr().err
