"""The table of machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import run
from shoal.cli.verbs import nodes
from shoal.wire.api import AgentView


def agent(**changes: Any) -> AgentView:
    fields: dict[str, Any] = {
        "agent": "lab-1",
        "machine": "gpu1",
        "cores": 4,
        "memory_bytes": 16 << 30,
        "devices": (),
        "slots": 2,
        "members": ("r/lab-1/0",),
        "connected": True,
        "heartbeat_age_s": 0.5,
        "load": 1.5,
        "notice": "",
        "via": "https://10.0.0.9:29300",
    }
    return AgentView(**{**fields, **changes})


def test_machine_is_one_row_with_its_members_and_address() -> None:
    head, row = nodes._text([("c0ffee", agent())]).splitlines()
    assert head.split()[:3] == ["AGENT", "MACHINE", "STATE"]
    assert row.split()[:4] == ["lab-1", "gpu1", "up", "4"]
    assert "1/2" in row
    assert row.split()[-2:] == ["10.0.0.9:29300", "c0ffee"]


def test_silent_machine_says_for_how_long_and_no_limit_is_shown_as_such() -> None:
    row = nodes._text([("c0ffee", agent(connected=False, heartbeat_age_s=90.0, slots=None))]).splitlines()[1]
    assert "silent for " in row
    assert "1/∞" in row


def test_home_without_coordinators_has_no_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    assert run(["nodes"]) == 0
    assert capsys.readouterr().out.startswith("no machines")
