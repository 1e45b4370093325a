"""`shoal explain`."""

from __future__ import annotations

import json

import pytest

from shoal import errors
from shoal.cli.main import run as shoal_cli


def test_code_is_explained_in_either_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal_cli(["explain", "s201"]) == 0
    assert capsys.readouterr().out.startswith("S201 WrongToken (exit code 4)\n\n")


def test_all_codes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal_cli(["explain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == errors.catalog().keys()


def test_unknown_code_is_reported_with_a_similar_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal_cli(["explain", "S20l"]) == 2
    assert "did you mean S" in capsys.readouterr().err
