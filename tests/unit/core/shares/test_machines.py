"""Setting ``shares.machines``: what the user declares of machines, and which members that means."""

from __future__ import annotations

import pytest

from shoal.core import emulation
from shoal.core.shares.balancer import ShareBalancer
from shoal.core.shares.machines import KnownMachine, facts_of, parse, positions
from shoal.core.shares.settings import parse as parse_settings
from shoal.errors import BadPlan

MACHINES = parse("lab-1/1 max=8, lab-1 speed=4 max=256, spot-* speed=0.5 share=2")


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        ("lab-1/0", KnownMachine("lab-1", 4.0, None, 256)),
        ("lab-1/1", KnownMachine("lab-1/1", None, None, 8)),
        ("spot-12/0", KnownMachine("spot-*", 0.5, 2.0, None)),
        ("lab-10/0", KnownMachine("*")),
        ("spot/0", KnownMachine("*")),
    ],
)
def test_first_pattern_that_fits_counts(member: str, expected: KnownMachine) -> None:
    assert facts_of(member, MACHINES) == expected


@pytest.mark.parametrize(
    "text",
    [
        "lab",
        "speed=2",
        "lab speed=0",
        "lab speed=inf",
        "lab speed=nan",
        "lab max=1.5",
        "lab max=0",
        "lab share=-1",
        "lab weight=2",
        "lab speed=1 speed=2",
        "lab speed=1,,",
        "lab speed=fast",
    ],
)
def test_malformed_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadPlan, match=r"invalid value for shares\.machines") as caught:
        parse(text)
    assert "speed=4" in caught.value.do


def test_fixed_weights_follow_the_member_whatever_order_it_joined_in() -> None:
    balancer = ShareBalancer(parse_settings("fixed:3,1"))
    assert balancer.shares(0, 64, ["local/0", "local/1"]) == (48, 16)
    assert balancer.shares(1, 64, ["local/1", "local/0"]) == (16, 48)
    assert positions(["b/0", "a/1", "a/0"]) == [2, 1, 0]


def test_fixed_weights_are_declared_for_machines() -> None:
    settings = parse_settings("fixed", machines="big share=3")
    assert ShareBalancer(settings).shares(0, 64, ["small/0", "big/0"]) == (16, 48)
    with pytest.raises(BadPlan):
        parse_settings("fixed", machines="big speed=3")


def test_declared_and_emulated_speeds_decide_the_first_split() -> None:
    members = ["big/0", "small/0"]
    assert parse_settings("model", machines="big speed=3").speeds_of(members) == [3.0, 1.0]
    assert parse_settings("model").speeds_of(members) is None
    emulated = parse_settings("model", emulation=emulation.parse("1,0.25"))
    assert emulated.speeds_of(["local/1", "local/0"]) == [0.25, 1.0]


def test_least_maximum_limits_what_is_computed_at_once() -> None:
    settings = parse_settings("model", max=32, machines="small max=8")
    assert [settings.most_at_once(name) for name in ("small/0", "big/0")] == [8, 32]
    assert parse_settings("model", max=0.5).most_at_once("big/0") is None
