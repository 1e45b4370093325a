from __future__ import annotations

import pytest

from shoal.errors import BadSettings, IncompleteEnvironment
from shoal.worker.session.environment import RunSettings, parse_settings, read

STARTED = {
    "SHOAL_URL": "http://127.0.0.1:1",
    "SHOAL_TOKEN_FILE": "token",
    "SHOAL_RUN": "r1",
    "SHOAL_MEMBER": "lab1/0",
    "SHOAL_INCARNATION": "a",
    "SHOAL_MEMBER_HOSTS": "127.0.0.1",
    "SHOAL_RUN_DIR": "runs/r1",
}


def test_without_a_coordinator_it_is_a_run_of_one() -> None:
    assert read({"SHOAL_RUN": "r1"}) is None


def test_a_member_learns_who_it_is() -> None:
    environment = read(STARTED | {"SHOAL_SETTINGS": '{"checkpoint.every_s": 5, "exchange": "ring"}'})
    assert environment is not None
    assert (environment.member, environment.host, environment.run_dir) == ("lab1/0", "127.0.0.1", "runs/r1")
    assert environment.settings == {"checkpoint.every_s": 5, "exchange": "ring"}
    assert (environment.values.checkpoint_every_s, environment.values.exchange, environment.values.lease_s) == (
        5.0,
        "ring",
        3.0,
    )


@pytest.mark.parametrize("name", sorted(set(STARTED) - {"SHOAL_URL"}))
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(IncompleteEnvironment, match=name):
        read({key: value for key, value in STARTED.items() if key != name})


def test_settings_have_the_documented_defaults() -> None:
    assert parse_settings({}) == RunSettings()
    assert (
        RunSettings().heartbeat_s,
        RunSettings().hang_timeout_s,
        RunSettings().checkpoint_keep,
        RunSettings().restarts_infrastructure,
    ) == (
        0.5,
        300,
        2,
        10,
    )


def test_text_from_the_command_line_is_taken_for_a_number() -> None:
    assert parse_settings({"lease_s": "5", "threads": "2"}).lease_s == 5.0


def test_an_unknown_setting_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadSettings, match=r"did you mean checkpoint\.every_s"):
        parse_settings({"checkpoint.evry_s": 1})


@pytest.mark.parametrize(
    ("key", "value"), [("lease_s", 0), ("threads", -1), ("exchange", "mpi"), ("ports", "x"), ("heartbeat_s", "soon")]
)
def test_an_impossible_value_is_refused(key: str, value: str | int) -> None:
    with pytest.raises(BadSettings):
        parse_settings({key: value})


@pytest.mark.parametrize("text", ["[]", "{", '{"lease_s": [1]}'])
def test_settings_that_are_no_json_object_are_refused(text: str) -> None:
    with pytest.raises(BadSettings):
        read(STARTED | {"SHOAL_SETTINGS": text})
