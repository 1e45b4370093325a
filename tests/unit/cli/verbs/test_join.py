"""What `shoal join` needs before it becomes an agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.main import run


@pytest.fixture(autouse=True)
def _without_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SHOAL_TOKEN_FILE", raising=False)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))


def test_token_file_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["join", "http://127.0.0.1:9"]) == 2
    assert "--token-file" in capsys.readouterr().err


def test_machine_does_not_join_a_coordinator_that_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("secret\n")
    assert run(["join", "http://127.0.0.1:9", "--token-file", str(tmp_path / "token")]) not in (0, 2)
    assert "127.0.0.1:9" in capsys.readouterr().err
    assert not (tmp_path / "home" / "agents").exists()
