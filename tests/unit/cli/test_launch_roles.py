"""Pools for roles, labels and budgets on the way from the command line to the run that is submitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.cli.main import run as shoal_cli
from shoal.cli.output import summary
from shoal.cli.verbs import ps, status, submit
from shoal.errors import BadLabels, BadPool, BadRole
from shoal.experiment import run as experiment_run
from shoal.experiment.roles import TRAINER
from shoal.launch import launch_plan as render
from shoal.launch import settings_layers
from shoal.wire.api import CostView, RoleSpec, RunSpec
from shoal.wire.pool_files import CoordinatorPools, write

POOLS = """
[pool.spot]
engine = "slurm"
price = 1.0
labels = {gpu = "a100"}
[pool.lab]
engine = "local"
[pool.rays]
engine = "ray"
labels = {gpu = "a100", zone = "b"}
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").touch()
    (tmp_path / "shoal.toml").write_text(POOLS)
    return tmp_path


def spec_of(*settings: str) -> RunSpec:
    choices = settings_layers.choose(Path.cwd(), {}, settings)
    return render.spec_of("train.py", (), module=False, compat="", choices=choices)


def test_a_role_has_pools_of_its_own_and_the_coordinator_is_told_of_all() -> None:
    spec = spec_of("on=spot", "evaluator=true", "evaluator_on=lab", "budget=12.5", "priority=3")
    assert (spec.on, spec.roles, spec.budget) == (("spot",), {"evaluator": RoleSpec(on=("lab",))}, 12.5)
    assert render.pools_of(spec) == ("spot", "lab")
    launch = render.render(Path("/nowhere"), settings_layers.choose(Path.cwd(), {}), spec)
    assert launch.hires is not None
    assert set(launch.hires.pools) == {"spot", "lab"}


def test_who_is_not_elsewhere_is_hired_here() -> None:
    assert spec_of("evaluator=true", "evaluator_on=lab").on == ("local",)
    assert spec_of("evaluator_on=lab").on == (), "a pool for a role that the run does not have changes nothing"
    assert spec_of("sync=async", "servers_on=lab").roles == {"server": RoleSpec(on=("lab",))}


def test_labels_choose_among_all_pools_or_those_named() -> None:
    assert spec_of("where=gpu=a100").on == ("rays", "spot"), "the cheapest first"
    assert spec_of("on=lab,spot", "where=gpu=a100").on == ("spot",)
    with pytest.raises(BadLabels):
        spec_of("where=gpu=h100")
    with pytest.raises(BadPool):
        spec_of("on=spot", "evaluator=true", "evaluator_on=moon")


def test_an_evaluator_is_asked_for_by_naming_its_pool(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal_cli(["run", "--dry-run", "--on", "lab", "--evaluator-on", "lab", "train.py"]) == 0
    said = capsys.readouterr().out
    assert "evaluator    on lab" in said
    assert "1 to 1 members and an evaluator" in said
    assert shoal_cli(["run", "--dry-run", "--on", "lab", "--servers-on", "lab", "train.py"]) == 3
    assert "this run has no server to start on lab" in capsys.readouterr().err


def test_a_dry_run_shows_what_every_engine_would_be_handed_without_secrets(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = 'engine = "ssh"\nhosts = ["gpu1"]\nenvironment = "needs.txt"\n'
    (project / "shoal.toml").write_text(f"{POOLS}[pool.hosts]\n{hosts}")
    (project / "needs.txt").write_text("numpy\n")
    assert shoal_cli(["run", "--dry-run", "--on", "spot,lab,rays,hosts", "-n", "2:16", "train.py"]) == 0
    said = capsys.readouterr().out
    for words in (
        "pool         spot: slurm",
        "sbatch",
        "--job-name=shoal-",
        "pool         rays: ray",
        "pool         hosts: ssh",
    ):
        assert words in said
    assert said.count("--orphan 1800.0") == 4, "with the options that agents are really given"
    assert said.count("--apart") == 2, "hosts and rays"
    assert not (project / "home").exists(), "nothing is made"


def test_submit_needs_a_coordinator(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal_cli(["submit", "train.py"]) == 2
    assert "SHOAL_URL" in capsys.readouterr().err


@pytest.mark.parametrize("amount", ["nan", "inf", "-1", "0"])
@pytest.mark.parametrize("verb", ["scale", "resume"])
def test_what_is_no_amount_is_no_budget(capsys: pytest.CaptureFixture[str], verb: str, amount: str) -> None:
    assert shoal_cli([verb, "train", "--budget", amount]) == 3
    assert f"error[S150] {amount} is no budget" in capsys.readouterr().err


def test_the_pools_that_a_coordinator_had_are_those_that_it_is_resumed_with(project: Path) -> None:
    directory = project / "home" / "before"
    directory.mkdir(parents=True)
    write(directory, CoordinatorPools({"lab": {"engine": "local", "limit": 1}, "gone": {"engine": "local"}}))
    launch = render.render(directory, settings_layers.choose(Path.cwd(), {}), None)
    assert launch.hires is not None
    assert launch.hires.pools == {"lab": {"engine": "local"}, "gone": {"engine": "local"}}, "as they are said now"


def test_a_role_of_python_has_pools_and_labels_too() -> None:
    roles = {TRAINER: shoal.Role(on="spot", where="gpu=a100"), "evaluator": shoal.Role(on="lab")}
    choices = settings_layers.choose(Path.cwd(), {}, options=experiment_run._options(roles, {"budget": 2.0}, "local"))
    spec = experiment_run._spec(Path("/nowhere"), "fn", roles, choices, {})
    assert (spec.on, spec.where, spec.budget) == (("spot",), {"gpu": "a100"}, 2.0)
    assert spec.roles["evaluator"].on == ("lab",)
    roles = {TRAINER: shoal.Role(where="zone=b")}
    choices = settings_layers.choose(Path.cwd(), {}, options=experiment_run._options(roles, {}, "local"))
    assert experiment_run._spec(Path("/nowhere"), "fn", roles, choices, {}).on == ("rays",)
    with pytest.raises(BadRole):
        experiment_run._options({TRAINER: shoal.Role(on="spot")}, {}, "lab")


# --- what is shown


def test_a_queued_run_says_its_place_and_what_it_waits_for(make: Any) -> None:
    waiting = make.run(
        status="starting", queued=2, waits_for="a place; held by other (4)", since=10.0, started=10.0, user="bob"
    )
    shown = ps._text([waiting, make.run(started=10.0)], 70.0)
    assert "starting, number 2" in shown
    assert "a place; held by other (4), since 1 min 0 s" in shown
    assert "WAITS FOR" not in ps._text([make.run(started=10.0)], 70.0)
    assert "number 2, waits for a place" in submit.text(waiting)
    assert "as a run of bob" in submit.text(waiting)


def test_a_budget_is_shown_with_how_long_it_lasts(make: Any) -> None:
    spending = make.run(cost=CostView(3600.0, 2.0, 0.0), budget=5.0, rate_per_h=2.0)
    assert "budget      5.00, 3.00 left, which pays 2.00 an hour for 1 h 30 min" in status.text(
        spending, 20.0, live=True
    )


def test_the_summary_of_a_run_that_has_spent_its_budget_says_how_to_go_on(make: Any) -> None:
    ended = make.run(status="resumable", exit_code=6, ended=5.0, cost=CostView(3600.0, 2.0, 4.0))
    text = summary.text(summary.of(ended, ()))
    assert "to go on    shoal resume train-7f3k --budget MORE" in text
    assert "cost        1.00 machine hours, 2.00 spent, 4.00 saved" in text
