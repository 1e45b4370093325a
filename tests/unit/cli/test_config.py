"""Settings: declared once, checked, and each with its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal import settings as shoal_settings
from shoal.errors import BadConfigFile, BadSettings, UsageError
from shoal.launch import settings_layers


def chosen(cwd: Path, environ: dict[str, str] | None = None, *assignments: str) -> settings_layers.ResolvedSettings:
    return settings_layers.choose(cwd, environ or {}, assignments)


def test_every_setting_has_a_help_and_a_default_of_its_own_type() -> None:
    for key in shoal_settings.declared():
        assert key.help
        assert shoal_settings.parse_value(key.name, key.default) == key.default


def test_variables_and_names_are_unique() -> None:
    keys = shoal_settings.declared()
    assert len({key.name for key in keys}) == len({key.variable for key in keys}) == len(keys)


def test_without_a_file_all_are_defaults(tmp_path: Path) -> None:
    choices = chosen(tmp_path)
    assert choices.file is None
    assert {one.source for one in choices.found.values()} == {"default"}
    assert choices.for_run() == {key.name: key.default for key in shoal_settings.declared() if key.travels}


def test_a_file_is_found_upwards_and_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "shoal.toml").write_text("# mine\n[run]\nlease_s = 2\n\n[checkpoint]\nkeep = 5\n")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    choices = chosen(inner)
    assert choices.found["lease_s"].value == 2.0
    assert choices.source("lease_s") == f"{tmp_path / 'shoal.toml'}:3"
    assert choices.source("checkpoint.keep") == f"{tmp_path / 'shoal.toml'}:6"


def test_later_sources_win(tmp_path: Path) -> None:
    (tmp_path / "shoal.toml").write_text("[run]\nlease_s = 2\nheartbeat_s = 0.2\nregroup_s = 0.1\nhang_timeout_s = 9\n")
    choices = settings_layers.choose(
        tmp_path,
        {"SHOAL_HEARTBEAT_S": "0.3", "SHOAL_REGROUP_S": "0.3", "SHOAL_HANG_TIMEOUT_S": "8"},
        ("regroup_s=0.4", "run.hang_timeout_s=7"),
        {"hang_timeout_s": ("--stall", 6)},
    )
    values = {name: choices.found[name].value for name in ("lease_s", "heartbeat_s", "regroup_s", "hang_timeout_s")}
    assert values == {"lease_s": 2.0, "heartbeat_s": 0.3, "regroup_s": 0.4, "hang_timeout_s": 6.0}
    assert choices.source("heartbeat_s") == "environment SHOAL_HEARTBEAT_S"
    assert choices.source("regroup_s") == "--set regroup_s=0.4"
    assert choices.source("hang_timeout_s") == "--stall"


def test_pyproject_counts_only_with_a_tool_shoal(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert chosen(tmp_path).file is None
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n[tool.shoal.run]\nmembers = '1:4'\n")
    choices = chosen(tmp_path)
    assert choices.text("members") == "1:4"
    assert choices.source("members").endswith("pyproject.toml:4")


def test_an_unknown_key_says_where_and_what_was_meant(tmp_path: Path) -> None:
    (tmp_path / "shoal.toml").write_text("[checkpoint]\n\nevry_s = 3\n")
    with pytest.raises(BadSettings) as caught:
        chosen(tmp_path)
    assert caught.value.where.endswith("shoal.toml:3")
    assert caught.value.do == "did you mean checkpoint.every_s?"
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("lease_s", "soon", "Expected `float`"),
        ("lease_s", -1, "Expected `float` > 0.0"),
        ("checkpoint.keep", 0, "Expected `int` >= 1"),
        ("checkpoint.keep", True, "Expected `int`"),
        ("checkpoint.to", 5, "Expected `str`"),
        ("exchange", "carrier-pigeon", "Invalid enum value"),
        ("ports", "5-3", "no range"),
        ("ports", "many", "matching regex"),
        ("ports", "0-70000", "no range"),
    ],
)
def test_a_wrong_value_is_named_with_its_reason(name: str, value: object, why: str) -> None:
    with pytest.raises(BadSettings) as caught:
        shoal_settings.parse_value(name, value, where="shoal.toml:7")
    assert caught.value.what == f"{name} cannot be {value!r}"
    assert why in caught.value.why
    assert caught.value.where == "shoal.toml:7"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[rnu]\nlease_s = 1\n", "there is no table [rnu]"),
        ("lease_s = 1\n", "there is no table [lease_s]"),
        ("[run\n", "the file is not TOML"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "shoal.toml").write_text(text)
    with pytest.raises(BadConfigFile) as caught:
        chosen(tmp_path)
    assert caught.value.what == what
    assert "shoal.toml:1" in caught.value.where


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shoal.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadConfigFile):
        chosen(tmp_path)


def test_a_table_where_a_value_belongs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shoal.toml").write_text("[run]\nlease_s = [1, 2]\n")
    with pytest.raises(BadSettings, match="a table or a list"):
        chosen(tmp_path)


def test_set_without_a_value_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no value"):
        chosen(tmp_path, {}, "lease_s")


def test_settings_that_travel_fill_the_members_settings(tmp_path: Path) -> None:
    settings = shoal_settings.parse_settings(chosen(tmp_path, {}, "checkpoint.keep=7").for_run())
    assert settings == shoal_settings.RunSettings(checkpoint_keep=7)
