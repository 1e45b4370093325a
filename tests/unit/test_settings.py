"""Settings are declared once and checked."""

from __future__ import annotations

import pytest

from shoal import settings as shoal_settings
from shoal.errors import BadSettings


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
def test_invalid_value_is_reported_with_its_reason(name: str, value: object, why: str) -> None:
    with pytest.raises(BadSettings) as caught:
        shoal_settings.parse_value(name, value, where="shoal.toml:7")
    assert caught.value.what == f"{name} cannot be {value!r}"
    assert why in caught.value.why
    assert caught.value.where == "shoal.toml:7"
