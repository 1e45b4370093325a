"""The setting `emulate`: parsing, errors and costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import settings
from shoal.core.emulation import EmulatedMachine, Emulation, member_number, parse
from shoal.errors import BadEmulation
from shoal.testing.emulated_speeds import machines

SPEEDS = st.floats(0.001, 1)


def test_list_of_speeds_gives_one_machine_per_member() -> None:
    assert parse("1,0.5, 0.25") == Emulation((EmulatedMachine(1.0), EmulatedMachine(0.5), EmulatedMachine(0.25)))


def test_empty_text_means_no_emulation() -> None:
    assert parse("") is None
    assert parse("  ") is None


def test_members_beyond_the_list_get_the_last_speed() -> None:
    emulation = parse("1,0.5")
    assert emulation is not None
    assert [emulation.machine(number).speed for number in range(4)] == [1, 0.5, 0.5, 0.5]


def test_speed_changes_at_its_step() -> None:
    emulation = parse("1,0.5:0.125@300:1@400")
    assert emulation is not None
    assert [emulation.machine(1).speed_at(step) for step in (0, 299, 300, 399, 400, 9000)] == [
        0.5,
        0.5,
        0.125,
        0.125,
        1,
        1,
    ]
    assert emulation.machine(0).speed_at(9000) == 1


def test_cost_scales_with_samples_but_not_its_fixed_part() -> None:
    emulation = parse("sample_s=0.002,fixed_s=0.01,1,0.25")
    assert emulation is not None
    assert emulation.cost_s(0, 10, 0) == pytest.approx(0.03)
    assert emulation.cost_s(1, 10, 0) == pytest.approx(0.09)
    assert emulation.cost_s(1, 0, 0) == pytest.approx(0.01)


def test_cost_without_speeds_makes_all_members_equal() -> None:
    assert parse("sample_s=0.002") == Emulation((EmulatedMachine(1.0),), 0.002)


@given(st.lists(st.tuples(SPEEDS, st.dictionaries(st.integers(1, 10**6), SPEEDS, max_size=3)), min_size=1, max_size=5))
def test_every_machine_survives_a_round_trip_through_text(wanted: list[tuple[float, dict[int, float]]]) -> None:
    made = tuple(EmulatedMachine(speed, tuple(sorted(changes.items()))) for speed, changes in wanted)
    texts = [":".join([str(m.speed), *(f"{speed}@{step}" for step, speed in m.changes)]) for m in made]
    assert parse(machines(*texts)) == Emulation(made)
    assert parse(machines(*texts, sample_s=0.002, fixed_s=0.01)) == Emulation(made, 0.002, 0.01)


@pytest.mark.parametrize(
    ("text", "what", "do"),
    [
        ("1,2", "invalid speed 2", "did you mean 0.5?"),
        ("0", "invalid speed 0", "for example"),
        ("-1", "invalid speed -1", "for example"),
        ("nan", "invalid speed 'nan'", "for example"),
        ("1,,1", "invalid speed ''", "for example"),
        ("1;0.5", "invalid speed '1;0.5'", "for example"),
        ("50%", "invalid speed '50%'", "did you mean 0.5?"),
        ("0.5x", "invalid speed '0.5x'", "did you mean 0.5?"),
        ("1,0.5>0.125@300", "'0.5>0.125@300'", "did you mean 0.5:0.125@300?"),
        ("0.5>0.125", "invalid speed '0.5>0.125'", "did you mean 0.5:0.125?"),
        ("0.5@300", "no speed before the first change", "1:0.5@300"),
        ("1:0.5", "invalid change of speed '0.5' in '1:0.5'", "1:0.25@300"),
        ("1:0.5@soon", "invalid change of speed '0.5@soon' in '1:0.5@soon'", "1:0.25@300"),
        ("1:0.5@0", "step 0 in '1:0.5@0' is out of order", "for example"),
        ("1:0.5@9:1@9", "step 9 in '1:0.5@9:1@9' is out of order", "for example"),
        ("1:2@9", "invalid speed 2", "did you mean 0.5?"),
        ("samples_s=0.1,1", "unknown key 'samples_s'", "did you mean sample_s=0.1?"),
        ("local/1=0.5", "unknown key 'local/1'", "sample_s or fixed_s"),
        ("sample_s=0", "invalid sample_s '0'", "sample_s=0.002"),
        ("sample_s=2ms,1", "invalid sample_s '2ms'", "sample_s=0.002"),
        ("sample_s=1,fixed_s=-1", "invalid fixed_s '-1'", "fixed_s=0.002"),
        ("sample_s=1,sample_s=1", "sample_s is given twice", "remove one"),
        ("fixed_s=1,1,0.5", "fixed_s requires sample_s", "sample_s="),
    ],
)
def test_invalid_text_is_named_with_a_remedy(text: str, what: str, do: str) -> None:
    with pytest.raises(BadEmulation) as raised:
        parse(text, "--emulate")
    assert what in raised.value.what
    assert do in raised.value.do
    assert raised.value.where == "--emulate"


def test_setting_is_validated() -> None:
    assert settings.parse_settings({"emulate": "1,0.5"}).emulate == "1,0.5"
    with pytest.raises(BadEmulation, match="S122"):
        settings.parse_value("emulate", "1,fast", where="shoal.toml:3")


def test_member_number_is_taken_from_its_name() -> None:
    names = ("local/0", "gpu-7/12", "a/b/3", "alone", "x/y")
    assert [member_number(name) for name in names] == [0, 12, 3, 0, 0]
