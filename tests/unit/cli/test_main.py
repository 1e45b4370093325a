"""The command `shoal`: errors become messages and exit codes."""

from __future__ import annotations

import json

import click
import pytest

from shoal import exit_codes
from shoal.cli import main
from shoal.cli.verbs import ps


def test_unknown_verb_is_reported_with_a_similar_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["statsu"]) == exit_codes.BAD_USAGE
    assert "unknown verb 'statsu'; did you mean status?" in capsys.readouterr().err


def test_usage_error_is_json_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--json", "ps", "--nonsense"]) == exit_codes.BAD_USAGE
    assert json.loads(capsys.readouterr().err)["code"] == "S100"


@pytest.mark.parametrize(
    ("error", "code"),
    [(click.exceptions.Abort(), exit_codes.INTERRUPTED), (BrokenPipeError(), exit_codes.BROKEN_PIPE)],
)
def test_interruption_and_closed_pipe_have_exit_codes(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(**options: object) -> None:
        raise error

    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr(ps.command, "callback", fail)
    assert main.run(["ps"]) == code
