"""Remote helper, run on this machine as it runs on a host."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.engines.ssh import helper_source
from shoal.engines.ssh.remote_helper import REPLY_MARK

pytestmark = pytest.mark.process


def call(tmp_path: Path, **request: Any) -> dict[str, Any]:
    text = f"{json.dumps(helper_source.program())}\n{json.dumps({'directory': str(tmp_path), **request})}"
    run = [sys.executable, "-I", "-c", "import json, sys; exec(json.loads(sys.stdin.readline()))"]
    done = subprocess.run(run, input=text, capture_output=True, text=True, check=True, timeout=60)
    reply: dict[str, Any] = json.loads(done.stdout.rpartition(REPLY_MARK)[2])
    return reply


def start(tmp_path: Path, allocation: str, *, room: int = 1, within_s: float = 60.0) -> dict[str, Any]:
    return call(
        tmp_path,
        do="start",
        tag="mine",
        allocation=allocation,
        room=room,
        script="echo up; exec sleep 600",
        credentials="secret",
        grace_s=1.0,
        start_by=time.time() + within_s,
    )


def test_allocation_starts_once_is_listed_and_stops(tmp_path: Path) -> None:
    assert start(tmp_path, "lab-1")["state"] == "started"
    assert start(tmp_path, "lab-1")["state"] == "started"
    assert start(tmp_path, "lab-2") == {"state": "full", "running": 1, "now": pytest.approx(time.time(), abs=60.0)}
    (listed,) = call(tmp_path, do="list", tag="mine")["allocations"]
    assert (listed["allocation"], listed["alive"]) == ("lab-1", True)
    assert call(tmp_path, do="list", tag="another")["others"] == 1
    for _ in range(2):
        assert call(tmp_path, do="cancel", tag="mine", allocation="lab-1")["state"] == "stopped"
    assert call(tmp_path, do="list", tag="mine")["allocations"] == []
    assert not (tmp_path / "allocations/mine/lab-1/token").exists()


def test_late_request_starts_nothing(tmp_path: Path) -> None:
    assert start(tmp_path, "lab-1", within_s=-1.0)["state"] == "late"
    assert call(tmp_path, do="list", tag="mine")["allocations"] == []


def test_check_reports_the_output_of_an_unfit_machine(tmp_path: Path) -> None:
    assert call(tmp_path, do="check", check="echo fit")["state"] == "fit"
    reply = call(tmp_path, do="check", check="echo 3.9.2; echo oh >&2; exit 3")
    assert (reply["state"], reply["exit"], reply["output"], reply["errors"]) == ("unfit", 3, "3.9.2\n", "oh\n")


def test_operating_system_error_is_a_reply(tmp_path: Path) -> None:
    (tmp_path / "allocations").write_text("not a directory")
    reply = start(tmp_path, "lab-1")
    assert (reply["state"], reply["errno"]) == ("failed", "ENOTDIR")
