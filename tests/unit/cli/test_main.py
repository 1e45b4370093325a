"""The command `shoal`: errors become messages and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


def test_deleted_working_directory_is_an_error_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for arguments in (["run", "train.py"], ["config"], ["doctor"]):
        assert main.run(arguments) == exit_codes.BAD_USAGE
        assert "error[S100] the working directory does not exist" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)


def test_missing_file_is_not_taken_for_a_deleted_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_missing(*arguments: object, **more: object) -> None:
        raise FileNotFoundError("other")

    monkeypatch.setattr(main.shoal, "main", raise_missing)
    with pytest.raises(FileNotFoundError, match="other"):
        main.run(["ps"])


def test_closed_standard_streams_are_opened() -> None:
    code = (
        "import os, sys; from shoal.cli import main; main._open_standard_streams(); sys.stdout.write('x'); "
        "sys.exit(0 if sys.stdin.read() == '' and os.pipe()[0] > 2 else 1)"
    )
    shell = 'exec "$@" <&- >&-'
    assert subprocess.run(["sh", "-c", shell, "sh", sys.executable, "-c", code], check=False).returncode == 0
