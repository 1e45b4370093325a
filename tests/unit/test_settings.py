"""Settings are declared once and checked."""

from __future__ import annotations

import pytest

from shoal import settings as shoal_settings
from shoal.errors import BadNoticeSource, BadSettings


def test_every_setting_has_a_help_and_a_valid_default() -> None:
    for info in shoal_settings.declared():
        assert info.help
        assert shoal_settings.parse_value(info.name, info.default) == info.default


def test_names_and_variables_are_unique() -> None:
    infos = shoal_settings.declared()
    assert len({info.name for info in infos}) == len({info.variable for info in infos}) == len(infos)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("lease_s", "soon", "expected a number > 0"),
        ("lease_s", -1, "expected a number > 0"),
        ("shares.threshold", 1, "expected a number ≥ 0 and < 1"),
        ("checkpoint.keep", 0, "expected an integer ≥ 1"),
        ("checkpoint.keep", True, "expected an integer ≥ 1"),
        ("checkpoint.to", 5, "expected text"),
        ("tensorboard", "perhaps", "expected true or false"),
        ("members", 1.5, "expected an integer or text"),
        ("exchange", "carrier-pigeon", "expected auto, ring, gloo or nccl"),
        ("ports", "5-3", "expected a range of ports from 1 to 65535, such as 29400-29499"),
        ("ports", "many", "expected a range of ports from 1 to 65535, such as 29400-29499"),
        ("ports", "1-99999999999999999999", "expected a range of ports from 1 to 65535, such as 29400-29499"),
        ("lease_s", "inf", "expected a number ≤ 1e+09 and > 0"),
        ("checkpoint.every_s", float("nan"), "expected a number ≤ 1e+09 and ≥ 0"),
        ("notice.grace_s", 1e30, "expected a number ≤ 1e+09 and ≥ 0"),
        ("checkpoint.keep", 1 << 63, "expected an integer ≤ 9.0072e+15 and ≥ 1"),
        ("servers", 10**9, "expected an integer ≥ 1 and ≤ 256"),
        ("heartbeat_s", 1e-9, "expected a number ≥ 0.01"),
        ("reconnect_s", 0, "expected a number ≥ 0.01"),
        ("ports", "29400-65536", "expected a range of ports from 1 to 65535, such as 29400-29499"),
        ("ports", "0-70000", "expected a range of ports from 1 to 65535, such as 29400-29499"),
    ],
)
def test_invalid_value_is_reported_with_what_is_valid(name: str, value: object, why: str) -> None:
    with pytest.raises(BadSettings) as caught:
        shoal_settings.parse_value(name, value, where="shoal.toml:7")
    assert caught.value.what == f"invalid value for {name}: {value!r}"
    assert caught.value.why == why
    assert caught.value.where == "shoal.toml:7"


def test_misspelt_choice_is_answered_with_the_similar_one() -> None:
    with pytest.raises(BadSettings) as caught:
        shoal_settings.parse_value("shares.mode", "continous")
    assert caught.value.do == "did you mean continuous?"


@pytest.mark.parametrize(
    ("source", "do"),
    [
        ("awz", "did you mean aws?"),
        ("GCP", "did you mean gcp?"),
        ("aws:rebalanced", "did you mean aws:rebalance?"),
        ("oracle", "use one of these, or install its plug-in on this machine too"),
        ("file:", "use file:/run/shutdown-notice, for example"),
        ("slurm:soon", "use slurm:60"),
    ],
)
def test_bad_notice_source_is_refused_where_the_setting_is_read(source: str, do: str) -> None:
    with pytest.raises(BadNoticeSource) as caught:
        shoal_settings.parse_value("notice.source", source, where="shoal.toml:7")
    assert (caught.value.do, caught.value.where) == (do, "shoal.toml:7")


@pytest.mark.parametrize("source", ["", "aws", "aws:rebalance", "gcp", "azure", "slurm", "slurm:90", "file:/tmp/x"])
def test_every_notice_source_of_the_documentation_is_accepted(source: str) -> None:
    assert shoal_settings.parse_value("notice.source", source) == source


def test_notice_source_of_an_installed_plug_in_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal_settings, "notice_plug_ins", lambda: ("oracle",))
    assert shoal_settings.parse_value("notice.source", "oracle") == "oracle"


def test_notice_url_without_a_scheme_is_refused() -> None:
    with pytest.raises(BadSettings, match=r"notice\.url"):
        shoal_settings.parse_value("notice.url", "metadata.internal")


def test_unknown_setting_of_a_run_is_answered_with_the_similar_one() -> None:
    with pytest.raises(BadSettings, match="unknown setting 'lease'") as caught:
        shoal_settings.parse_settings({"lease": 3})
    assert caught.value.do == "did you mean lease_s?"


def test_lease_that_is_too_short_for_its_heartbeats_is_refused() -> None:
    with pytest.raises(BadSettings, match=r"lease_s=0.5 is too short for heartbeat_s=0.5") as caught:
        shoal_settings.parse_settings({"lease_s": 0.5})
    assert caught.value.do == "set heartbeat_s=0.25 or less, or lease_s=1 or more"
    assert shoal_settings.parse_settings({"lease_s": 0.5, "heartbeat_s": 0.1}).lease_s == 0.5


def test_number_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(BadSettings, match=r"digits|checkpoint\.keep"):
        shoal_settings.parse_value("checkpoint.keep", "1" + "0" * 5000)


def test_whole_range_of_ports_may_be_given() -> None:
    assert shoal_settings.parse_value("ports", "1-65535") == "1-65535"
