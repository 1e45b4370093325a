"""What an agent tells its members of a disk that its machine does not see."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.agent.member_processes import MemberProcesses
from shoal.wire.agent_messages import StartMemberMsg


def told(tmp_path: Path, *, apart: bool, project: str = "", seen: bool = True) -> StartMemberMsg:
    """The order that a machine carries out, for one that a coordinator gave."""
    run_dir, cwd = tmp_path / "runs" / "r", tmp_path / "work"
    cwd.mkdir()
    if seen:
        run_dir.mkdir(parents=True)
    laid_out = SimpleNamespace(lay_out=lambda name, run: tmp_path / "agent" / "runs" / run / name)
    home = SimpleNamespace(apart=apart, directory=tmp_path / "agent")
    stub = SimpleNamespace(_home=home, _luggage=laid_out)
    order = StartMemberMsg("r", "m", "i", ("train.py",), str(cwd), {"SHOAL_RUN_DIR": str(run_dir)}, project=project)
    return asyncio.run(MemberProcesses._at_home(stub, order))  # type: ignore[arg-type]


def test_where_all_is_seen_nothing_changes(tmp_path: Path) -> None:
    found = told(tmp_path, apart=False, project="project")
    assert (found.cwd, found.env) == (str(tmp_path / "work"), {"SHOAL_RUN_DIR": str(tmp_path / "runs" / "r")})


def test_a_machine_apart_works_on_a_copy_and_keeps_nothing(tmp_path: Path) -> None:
    found = told(tmp_path, apart=True, project="project")
    copy = str(tmp_path / "agent" / "runs" / "r" / "project")
    assert (found.cwd, found.env["SHOAL_APART"], found.env["SHOAL_STORE"]) == (copy, copy, "coordinator://r")
    assert found.env["SHOAL_RUN_DIR"] == str(tmp_path / "agent" / "runs" / "r")


def test_a_machine_apart_without_a_project_sends_back_what_it_saves(tmp_path: Path) -> None:
    found = told(tmp_path, apart=True)
    assert (found.cwd, found.env["SHOAL_APART"]) == (str(tmp_path / "work"), str(tmp_path / "work"))


@pytest.mark.parametrize("project", ["", "project"])
def test_a_machine_that_sees_the_project_but_not_the_runs_directory_sends_checkpoints_only(
    tmp_path: Path, project: str
) -> None:
    found = told(tmp_path, apart=False, project=project, seen=False)
    assert found.env["SHOAL_STORE"] == "coordinator://r"
    assert (found.cwd, "SHOAL_APART" in found.env) == (str(tmp_path / "work"), False)
