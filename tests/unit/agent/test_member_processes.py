"""Paths that an agent gives its members on a machine that does not share the user's disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shoal.agent.log_tail import LogTail
from shoal.agent.member_processes import AgentContext, MemberProcess, MemberProcesses, localized
from shoal.agent.outbox import Outbox
from shoal.agent.project_files import ProjectCache
from shoal.launch.settings_layers import RESERVED_VARIABLES
from shoal.settings import declared
from shoal.wire.agent_messages import MemberExitedMsg, StartMemberMsg


class LaidOut(ProjectCache):
    """Cache that has every project already."""

    def lay_out(self, name: str, run: str) -> Path:
        return self._directory / run / name


def localize(tmp_path: Path, *, apart: bool, project: str = "", run_dir_visible: bool = True) -> StartMemberMsg:
    """Return the request as this machine carries it out."""
    run_dir, cwd, agent_dir = tmp_path / "runs" / "r", tmp_path / "work", tmp_path / "agent"
    cwd.mkdir()
    if run_dir_visible:
        run_dir.mkdir(parents=True)
    context = AgentContext("http://h:1", "token", agent_dir, None, "", {}, tmp_path / "cache", apart=apart)
    projects = LaidOut("http://h:1", "token", tmp_path / "cache", agent_dir / "runs")
    request = StartMemberMsg("r", "m", "i", ("train.py",), str(cwd), {"SHOAL_RUN_DIR": str(run_dir)}, project=project)
    return asyncio.run(localized(request, context, projects))


def test_request_is_unchanged_where_the_disk_is_shared(tmp_path: Path) -> None:
    request = localize(tmp_path, apart=False, project="project")
    assert (request.cwd, request.env) == (str(tmp_path / "work"), {"SHOAL_RUN_DIR": str(tmp_path / "runs" / "r")})


def test_machine_apart_works_on_a_copy_and_stores_at_the_coordinator(tmp_path: Path) -> None:
    request = localize(tmp_path, apart=True, project="project")
    copy = str(tmp_path / "agent" / "runs" / "r" / "project")
    assert (request.cwd, request.env["SHOAL_APART"], request.env["SHOAL_STORE"]) == (copy, copy, "coordinator://r")
    assert request.env["SHOAL_RUN_DIR"] == str(tmp_path / "agent" / "runs" / "r")


def test_machine_apart_without_a_project_sends_outputs_back(tmp_path: Path) -> None:
    request = localize(tmp_path, apart=True)
    assert (request.cwd, request.env["SHOAL_APART"]) == (str(tmp_path / "work"), str(tmp_path / "work"))


@pytest.mark.parametrize("project", ["", "project"])
def test_machine_that_sees_the_project_but_not_the_run_directory_sends_checkpoints_only(
    tmp_path: Path, project: str
) -> None:
    request = localize(tmp_path, apart=False, project=project, run_dir_visible=False)
    assert request.env["SHOAL_STORE"] == "coordinator://r"
    assert (request.cwd, "SHOAL_APART" in request.env) == (str(tmp_path / "work"), False)


def test_variable_of_a_member_is_never_that_of_a_setting(tmp_path: Path) -> None:
    async def variables() -> dict[bytes, bytes]:
        context = AgentContext("http://127.0.0.1:1", "token", tmp_path, None, "", {}, tmp_path / "cache")
        members = MemberProcesses(context, (), Outbox())
        request = StartMemberMsg("r", "m", "i", ("train.py",), str(tmp_path), {})
        member = MemberProcess(request, LogTail(tmp_path / "log"), tmp_path / "why", 0)
        return members._fork_request("k", member, tmp_path / "log").variables

    # A `shoal run` that a member's script starts would take it for the setting.
    names = {name.decode() for name in asyncio.run(variables()) if name.startswith(b"SHOAL_")}
    assert "SHOAL_MEMBER_HOSTS" in names
    assert names.isdisjoint(info.variable for info in declared())
    assert all(RESERVED_VARIABLES.fullmatch(name) for name in names)


def test_start_that_fails_unexpectedly_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start() -> list[MemberExitedMsg]:
        context = AgentContext("http://127.0.0.1:1", "token", tmp_path, None, "", {}, tmp_path / "cache")
        outbox = Outbox()
        members = MemberProcesses(context, (), outbox)
        monkeypatch.setattr(members, "_fork_request", lambda *_: {}["bug"])
        await members.start(StartMemberMsg("r", "m", "i", ("train.py",), str(tmp_path), {}))
        return [message for message in outbox._events if isinstance(message, MemberExitedMsg)]

    [exited] = asyncio.run(start())
    assert (exited.member, exited.cause, "bug" in exited.detail) == ("m", "infrastructure", True)
