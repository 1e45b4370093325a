"""Tokens of the users of a standing coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.main import run as shoal_cli
from shoal.wire import credentials


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    credentials.write(tmp_path / "token", credentials.Credentials("own"))
    return tmp_path


def test_token_is_created_once_renewed_and_revoked(directory: Path) -> None:
    path, options = directory / "tokens" / "ada", ["token", "ada", "--dir", str(directory)]
    assert shoal_cli(options) == 0
    first = credentials.read(path).token
    assert first != "own"
    assert path.stat().st_mode & 0o077 == 0, "readable by the owner only"
    assert shoal_cli(options) == 2
    assert credentials.read(path).token == first
    assert shoal_cli([*options, "--renew"]) == 0
    assert credentials.read(path).token != first
    assert shoal_cli([*options, "--revoke"]) == 0
    assert not path.exists()
    assert shoal_cli([*options, "--revoke"]) == 2


@pytest.mark.parametrize("name", ["../evil", ".hidden", "", "a b"])
def test_name_that_is_not_a_file_name_is_rejected(directory: Path, name: str) -> None:
    assert shoal_cli(["token", name, "--dir", str(directory)]) == 2
    assert not (directory / "tokens").exists()
