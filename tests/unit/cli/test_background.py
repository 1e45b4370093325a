"""What a detached run prints, and what its supervisor writes to its log."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from tests.unit.views import run_view

from shoal.cli import background
from shoal.cli.options import OutputOptions
from shoal.cli.output.lines import PlainOutput
from shoal.launch.background import SupervisorReply
from shoal.launch.launch_plan import LaunchPlan


def test_detached_run_is_named_with_the_verbs_that_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reply").write_bytes(msgspec.json.encode(SupervisorReply(run=run_view("train-1"))))
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ncat > /dev/null\ncat {tmp_path}/reply\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert background.detach(OutputOptions(), LaunchPlan("/d", coordinator=(), agent=())) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run train-1 accepted"
    assert [line.split()[-2:] for line in lines[1:]] == [["status", "train-1"], ["-f", "train-1"], ["stop", "train-1"]]


def test_log_of_the_supervisor_has_no_output_of_members() -> None:
    lines: list[str] = []
    display = background._WithoutMemberOutput(PlainOutput(lines.append))
    display.logs([("local/0", "epoch 1")])
    display.note("the coordinator is back")
    assert lines == ["shoal: the coordinator is back"]
