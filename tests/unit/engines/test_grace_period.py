"""Agents have handed over before their engines kill them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.engines import grace_period
from shoal.engines.engine import AllocationRequest
from shoal.wire.credentials import Credentials

REQUEST = AllocationRequest("a-1", "t", "http://h:1", Credentials("x"), 1)


@pytest.mark.parametrize(
    ("options", "granted_s", "shortened"),
    [
        ((), 60.0, ()),
        ((), 30.0, ("--grace", "25")),
        (("--grace", "20", "--idle", "5"), 30.0, ("--grace", "20", "--idle", "5")),
        (("--idle", "5", "--grace", "120", "--apart"), 30.0, ("--idle", "5", "--apart", "--grace", "25")),
        (("--grace", "30"), 4.0, ("--grace", "2")),
        (("--grace", "30"), 0.0, ("--grace", "0")),
    ],
)
def test_grace_period_is_shorter_than_the_engine_grants(
    options: tuple[str, ...], granted_s: float, shortened: tuple[str, ...]
) -> None:
    assert grace_period.within(replace(REQUEST, options=options), granted_s).options == shortened


def test_grace_period_is_read_from_the_agents_options() -> None:
    assert grace_period.of(replace(REQUEST, options=("--grace", "20"))) == 20.0
    assert grace_period.of(REQUEST) == 30.0
