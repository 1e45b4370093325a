"""Settings are merged from layers, checked, and keep their source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal import settings as shoal_settings
from shoal.errors import BadConfigFile, BadNoticeSource, BadSettings, UsageError
from shoal.launch import settings_layers


def resolved(cwd: Path, environ: dict[str, str] | None = None, *assignments: str) -> settings_layers.ResolvedSettings:
    return settings_layers.resolve(cwd, environ or {}, assignments)


def test_settings_without_a_file_are_defaults(tmp_path: Path) -> None:
    settings = resolved(tmp_path)
    assert settings.file is None
    assert {setting.source for setting in settings.values.values()} == {"default"}
    assert settings.for_run() == {key.name: key.default for key in shoal_settings.declared() if key.travels}


def test_file_is_found_in_a_parent_directory_and_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "shoal.toml").write_text("# mine\n[run]\nlease_s = 2\n\n[checkpoint]\nkeep = 5\n")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    settings = resolved(inner)
    assert settings.values["lease_s"].value == 2.0
    assert settings.source("lease_s") == f"{tmp_path / 'shoal.toml'}:3"
    assert settings.source("checkpoint.keep") == f"{tmp_path / 'shoal.toml'}:6"


def test_later_layers_win(tmp_path: Path) -> None:
    (tmp_path / "shoal.toml").write_text("[run]\nlease_s = 2\nheartbeat_s = 0.2\nregroup_s = 0.1\nhang_timeout_s = 9\n")
    settings = settings_layers.resolve(
        tmp_path,
        {"SHOAL_HEARTBEAT_S": "0.3", "SHOAL_REGROUP_S": "0.3", "SHOAL_HANG_TIMEOUT_S": "8"},
        ("regroup_s=0.4", "run.hang_timeout_s=7"),
        {"hang_timeout_s": ("--stall", 6)},
    )
    values = {name: settings.values[name].value for name in ("lease_s", "heartbeat_s", "regroup_s", "hang_timeout_s")}
    assert values == {"lease_s": 2.0, "heartbeat_s": 0.3, "regroup_s": 0.4, "hang_timeout_s": 6.0}
    assert settings.source("heartbeat_s") == "environment SHOAL_HEARTBEAT_S"
    assert settings.source("regroup_s") == "--set regroup_s=0.4"
    assert settings.source("hang_timeout_s") == "--stall"


def test_pyproject_is_read_only_with_a_tool_shoal_table(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert resolved(tmp_path).file is None
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n[tool.shoal.run]\nmembers = '1:4'\n")
    settings = resolved(tmp_path)
    assert settings.text("members") == "1:4"
    assert settings.source("members").endswith("pyproject.toml:4")


def test_unknown_setting_is_reported_with_its_line_and_a_similar_name(tmp_path: Path) -> None:
    (tmp_path / "shoal.toml").write_text("[checkpoint]\n\nevry_s = 3\n")
    with pytest.raises(BadSettings) as caught:
        resolved(tmp_path)
    assert caught.value.where.endswith("shoal.toml:3")
    assert caught.value.do == "did you mean checkpoint.every_s?"
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[rnu]\nlease_s = 1\n", "unknown table [rnu]"),
        ("lease_s = 1\n", "unknown table [lease_s]"),
        ("[run\n", "invalid TOML"),
    ],
)
def test_invalid_file_is_rejected_with_its_line(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "shoal.toml").write_text(text)
    with pytest.raises(BadConfigFile) as caught:
        resolved(tmp_path)
    assert caught.value.what == what
    assert "shoal.toml:1" in caught.value.where


def test_file_that_is_not_text_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "shoal.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadConfigFile):
        resolved(tmp_path)


def test_table_in_place_of_a_value_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "shoal.toml").write_text("[run]\nlease_s = [1, 2]\n")
    with pytest.raises(BadSettings, match="a table or a list"):
        resolved(tmp_path)


def test_assignment_without_a_value_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no value"):
        resolved(tmp_path, {}, "lease_s")


def test_settings_for_a_run_become_the_members_settings(tmp_path: Path) -> None:
    run_settings = shoal_settings.parse_settings(resolved(tmp_path, {}, "checkpoint.keep=7").for_run())
    assert run_settings == shoal_settings.RunSettings(checkpoint_keep=7)


@pytest.mark.parametrize(
    ("text", "do"),
    [
        ("[members]\nmin = 1\n", "members belongs under [run]"),
        ("lease_s = 1\n", "lease_s belongs under [run]"),
        ("[checkpoints]\nkeep = 1\n", "did you mean [checkpoint]?"),
    ],
)
def test_unknown_table_is_answered_with_the_right_one(tmp_path: Path, text: str, do: str) -> None:
    (tmp_path / "shoal.toml").write_text(text)
    with pytest.raises(BadConfigFile) as caught:
        resolved(tmp_path)
    assert caught.value.do == do


@pytest.mark.parametrize(
    ("variable", "meant"),
    [("SHOAL_LEASE", "SHOAL_LEASE_S"), ("SHOAL_HEARTBEATS_S", "SHOAL_HEARTBEAT_S"), ("SHOAL_HOSTS", "SHOAL_HOST")],
)
def test_misspelt_variable_is_refused_with_the_similar_one(tmp_path: Path, variable: str, meant: str) -> None:
    with pytest.raises(BadSettings, match=f"unknown environment variable {variable}") as caught:
        resolved(tmp_path, {variable: "5"})
    assert f"did you mean {meant}?" in caught.value.do


def test_variables_of_shoal_itself_and_unrelated_ones_are_allowed() -> None:
    """Whatever variable the source names must not be taken for a misspelt setting."""
    source = Path(settings_layers.__file__).parent.parent
    used = {name for path in source.rglob("*.py") for name in re.findall(r"\bSHOAL_[A-Z_]*[A-Z]\b", path.read_text())}
    assert {"SHOAL_URL", "SHOAL_MEMBER", "SHOAL_HOME"} <= used
    settings_layers.check_variables([*(used - {"SHOAL_LEASE"}), "SHOAL_TASK", "PATH"])


@pytest.mark.parametrize("layer", ["file", "environment", "--set", "option"])
def test_bad_notice_source_is_refused_in_every_layer(tmp_path: Path, layer: str) -> None:
    if layer == "file":
        (tmp_path / "shoal.toml").write_text('[notice]\nsource = "awz"\n')
    environ = {"SHOAL_NOTICE_SOURCE": "awz"} if layer == "environment" else {}
    assignments = ("notice.source=awz",) if layer == "--set" else ()
    options: dict[str, settings_layers.Option] = {"notice.source": ("option", "awz")} if layer == "option" else {}
    with pytest.raises(BadNoticeSource, match="unknown notice source 'awz'") as caught:
        settings_layers.resolve(tmp_path, environ, assignments, options)
    assert caught.value.do == "did you mean aws?"
    assert layer.removeprefix("file") in caught.value.where
