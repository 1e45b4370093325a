"""The start of a detached supervisor, which a script stands for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.unit.views import run_view

from shoal.errors import BadSettings, ServiceFailed
from shoal.launch import background
from shoal.launch.background import SupervisorReply, start_in_background
from shoal.launch.launch_plan import LaunchPlan
from shoal.wire.api import ErrorView

PLAN = LaunchPlan("/somewhere", coordinator=("coordinator",), agent=())


def supervisor(path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let a shell script be the interpreter that supervisors are started with."""
    program = path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def reply(path: Path, monkeypatch: pytest.MonkeyPatch, answer: SupervisorReply) -> None:
    (path / "reply").write_bytes(msgspec.json.encode(answer))
    supervisor(path, monkeypatch, f"cat > {path}/plan; cat {path}/reply")


def test_supervisor_gets_the_plan_and_its_run_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reply(tmp_path, monkeypatch, SupervisorReply(run=run_view("r")))
    assert start_in_background(PLAN) == run_view("r")
    assert msgspec.json.decode((tmp_path / "plan").read_bytes(), type=LaunchPlan) == PLAN


def test_error_of_the_supervisor_is_raised_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ErrorView(BadSettings.code, "unknown setting 'x'", "", "no such", "remove it")
    reply(tmp_path, monkeypatch, SupervisorReply(problem=problem))
    with pytest.raises(BadSettings, match="unknown setting 'x'") as error:
        start_in_background(PLAN)
    assert error.value.do == "remove it"


def test_supervisor_that_says_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor(tmp_path, monkeypatch, "cat > /dev/null")
    with pytest.raises(ServiceFailed, match="exited before the run was accepted"):
        start_in_background(PLAN)


def test_reply_ends_with_the_stream_while_the_process_lives_on() -> None:
    argv = ["sh", "-c", "cat; exec >/dev/null; exec sleep 60"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert background._exchange(process, b"request") == b"request"
            assert process.poll() is None
        finally:
            process.kill()
