"""What `shoal coordinator` prints, and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.cli.main import run
from shoal.cli.options import OutputOptions
from shoal.cli.verbs import coordinator


def test_coordinator_is_announced_with_the_commands_that_use_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pid").write_text(f"{os.getpid()}\n")
    (tmp_path / "url").write_text("https://lab:7000\n")
    coordinator._announce(OutputOptions(), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"coordinator {tmp_path.name} at https://lab:7000"
    assert f"shoal submit --url https://lab:7000 --token-file {tmp_path}/token SCRIPT" in lines[2]
    assert f"shoal join https://lab:7000 --token-file {tmp_path}/token" in lines[3]


def test_url_of_an_earlier_process_is_not_announced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "READY_TIMEOUT_S", 0.05)
    (tmp_path / "pid").write_text("1\n")
    (tmp_path / "url").write_text("https://lab:7000\n")
    coordinator._announce(OutputOptions(), tmp_path)
    assert capsys.readouterr().out == ""


def test_port_out_of_range_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["coordinator", "--port", "70000"]) == 2
    assert "70000" in capsys.readouterr().err
