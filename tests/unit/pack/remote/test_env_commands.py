"""Environment variables, logs and cancellation of build commands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoal.errors import EnvironmentUnusable
from shoal.pack.remote.env_commands import BuildCommands, agent_env, build_env, log_tail


def test_build_ignores_variables_that_point_outside_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "https://example.org/simple")
    env = build_env(str(tmp_path))
    assert "PYTHONPATH" not in env
    assert (env["TMPDIR"], env["PIP_INDEX_URL"]) == (str(tmp_path / "tmp"), "https://example.org/simple")


def test_agent_finds_the_scripts_of_its_environment_and_shoal_first() -> None:
    env = agent_env({"PATH": "/bin", "PYTHONPATH": "/lib"}, "/env/bin/python", "/shoal")
    assert env == {"PATH": "/env/bin:/bin", "VIRTUAL_ENV": "/env", "PYTHONPATH": "/shoal:/lib"}
    assert "PYTHONPATH" not in agent_env({}, "/env/bin/python", "")


def test_log_tail_masks_passwords_in_urls(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("first\n\n  from https://ada:pa55@example.org/simple  \n")
    assert log_tail(str(tmp_path)) == ["first", "from https://****@example.org/simple"]
    assert log_tail(str(tmp_path / "missing")) == []


def test_failed_command_is_reported_with_its_last_line(tmp_path: Path) -> None:
    commands = BuildCommands(lambda: None, "env.tar.gz")
    assert commands.output(str(tmp_path), [sys.executable, "-c", "print(7)"]) == "7"
    with pytest.raises(EnvironmentUnusable) as raised:
        commands.output(str(tmp_path), [sys.executable, "-c", "raise SystemExit('no such library')"])
    assert raised.value.why == "no such library"
    assert not (tmp_path / "output").exists()
