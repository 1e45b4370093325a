"""What `shoal run --dry-run` shows, and which options it rejects."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.directories import ended_coordinator

from shoal.cli.main import run as shoal_cli
from shoal.cli.options import OutputOptions
from shoal.cli.verbs import run
from shoal.launch.coordinator_target import CoordinatorTarget

POOLS = """
[pool.spot]
engine = "slurm"
[pool.lab]
engine = "local"
[pool.rays]
engine = "ray"
[pool.hosts]
engine = "ssh"
hosts = ["gpu1"]
environment = "needs.txt"
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").touch()
    (tmp_path / "needs.txt").write_text("numpy\n")
    (tmp_path / "shoal.toml").write_text(POOLS)
    return tmp_path


def test_evaluator_is_requested_by_naming_its_pool(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal_cli(["run", "--dry-run", "--on", "lab", "--evaluator-on", "lab", "train.py"]) == 0
    output = capsys.readouterr().out
    assert "evaluator    on lab" in output
    assert "1 member and an evaluator" in output


def test_pools_for_servers_that_the_run_does_not_have_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal_cli(["run", "--dry-run", "--on", "lab", "--servers-on", "lab", "train.py"]) == 3
    assert "this run has no server to start on lab" in capsys.readouterr().err


def test_dry_run_shows_the_request_to_each_engine_without_secrets(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shoal_cli(["run", "--dry-run", "--on", "spot,lab,rays,hosts", "-n", "2:16", "train.py"]) == 0
    output = capsys.readouterr().out
    for words in (
        "pool         spot: slurm",
        "sbatch",
        "--job-name=shoal-",
        "pool         rays: ray",
        "pool         hosts: ssh",
    ):
        assert words in output
    assert output.count("--orphan 1800.0") == 4, "agents get the options that a real run gives them"
    assert output.count("--apart") == 2, "hosts and rays"
    assert not (project / "home").exists(), "nothing is created"


def test_environment_variables_reach_the_run_on_every_engine(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "--dry-run", "--env", "A=1", "--env", "B=two words", "--on", "spot,hosts", "train.py"]
    assert shoal_cli(command) == 0
    output = capsys.readouterr().out
    assert "env          A=1\n" in output
    assert "env          B='two words'\n" in output


@pytest.mark.parametrize("option", [("--emulate", "1,0.5"), ("--sync", "async"), ("--evaluator",)])
def test_options_of_shoal_loops_are_rejected_for_unmodified_scripts(option: tuple[str, ...]) -> None:
    assert shoal_cli(["run", "--dry-run", "--compat", "torchrun", *option, "train.py"]) != 0


def test_run_removes_older_runs_only_if_retain_days_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = ended_coordinator(tmp_path, "a")
    run._apply_retention(OutputOptions(), CoordinatorTarget(tmp_path), ())
    assert directory.exists()
    run._apply_retention(OutputOptions(), CoordinatorTarget(tmp_path), ("retain_days=1",))
    assert not directory.exists()
