"""Unequal machines: what `--emulate` says, and how long a member sleeps for it."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import settings
from shoal.core.emulation import EmulatedMachine, Emulation, member_number, parse
from shoal.errors import BadEmulation
from shoal.testing.emulated_speeds import best_shares, machines, step_s
from shoal.worker.training.slowdown import Clocks, FixedStepCost, Slowdown, StretchedCompute, slowdown_for

SPEEDS = st.floats(0.001, 1)


# --- the text


def test_a_list_of_speeds_is_one_machine_for_each_member() -> None:
    assert parse("1,0.5, 0.25") == Emulation((EmulatedMachine(1.0), EmulatedMachine(0.5), EmulatedMachine(0.25)))


def test_no_text_is_no_emulation() -> None:
    assert parse("") is None
    assert parse("  ") is None


def test_members_beyond_the_list_are_like_the_last() -> None:
    told = parse("1,0.5")
    assert told is not None
    assert [told.machine(number).speed for number in range(4)] == [1, 0.5, 0.5, 0.5]


def test_a_speed_changes_when_its_step_begins() -> None:
    told = parse("1,0.5:0.125@300:1@400")
    assert told is not None
    assert [told.machine(1).speed_at(step) for step in (0, 299, 300, 399, 400, 9000)] == [0.5, 0.5, 0.125, 0.125, 1, 1]
    assert told.machine(0).speed_at(9000) == 1


def test_a_cost_counts_samples_by_speed_and_the_rest_by_none() -> None:
    told = parse("sample_s=0.002,fixed_s=0.01,1,0.25")
    assert told is not None
    assert told.cost_s(0, 10, 0) == pytest.approx(0.03)
    assert told.cost_s(1, 10, 0) == pytest.approx(0.09)
    assert told.cost_s(1, 0, 0) == pytest.approx(0.01)


def test_a_cost_alone_makes_all_members_equal() -> None:
    assert parse("sample_s=0.002") == Emulation((EmulatedMachine(1.0),), 0.002)


@given(st.lists(st.tuples(SPEEDS, st.dictionaries(st.integers(1, 10**6), SPEEDS, max_size=3)), min_size=1, max_size=5))
def test_every_machine_can_be_written_down(wanted: list[tuple[float, dict[int, float]]]) -> None:
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
def test_text_that_cannot_be_read_is_named_and_mended(text: str, what: str, do: str) -> None:
    with pytest.raises(BadEmulation) as refused:
        parse(text, "--emulate")
    assert what in refused.value.what
    assert do in refused.value.do
    assert refused.value.where == "--emulate"


def test_the_setting_is_checked_before_anything_is_started() -> None:
    assert settings.parse_settings({"emulate": "1,0.5"}).emulate == "1,0.5"
    with pytest.raises(BadEmulation, match="S122"):
        settings.parse_value("emulate", "1,fast", where="shoal.toml:3")


def test_a_member_finds_its_number_in_its_name() -> None:
    names = ("local/0", "gpu-7/12", "a/b/3", "alone", "x/y")
    assert [member_number(name) for name in names] == [0, 12, 3, 0, 0]


# --- the sleep


class Hands:
    """A machine whose work and sleep take the time that they are told to."""

    def __init__(self, contention: float = 1.0) -> None:
        self.now_s, self.spent_s, self.contention = 100.0, 7.0, contention
        self.clocks = Clocks(lambda: self.now_s, lambda: self.spent_s, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def work(self, cpu_s: float) -> None:
        self.spent_s += cpu_s
        self.now_s += cpu_s * self.contention

    def step(
        self, pace: Slowdown, number: int, samples: int, sample_s: float, fixed_s: float = 0.0
    ) -> tuple[float, float]:
        """One step, two thirds of it in the backward pass: when the gradients begin to leave, and when it ends."""
        cpu_s, began_s = fixed_s + sample_s * samples, self.now_s
        pace.begin(number)
        self.work(cpu_s / 3)
        pace.before_exchange(samples, samples)
        sent_s = self.now_s
        self.work(cpu_s * 2 / 3)
        pace.after_backward()
        return sent_s - began_s, self.now_s - began_s


def test_a_quarter_of_the_speed_takes_four_times_as_long_from_the_first_step_on() -> None:
    hands = Hands()
    pace = StretchedCompute(EmulatedMachine(0.25), hands.clocks)
    assert [hands.step(pace, k, 10, 0.3)[1] for k in range(3)] == [pytest.approx(12.0)] * 3


def test_time_grows_with_samples() -> None:
    hands = Hands()
    pace = StretchedCompute(EmulatedMachine(0.5), hands.clocks)
    assert [hands.step(pace, k, n, 0.3)[1] for k, n in enumerate((10, 5, 40, 1, 0, 8))] == [
        pytest.approx(2 * 0.3 * n) for n in (10, 5, 40, 1, 0, 8)
    ]


def test_a_step_that_is_mostly_fixed_cost_is_never_stretched_too_far() -> None:
    hands = Hands()
    pace = StretchedCompute(EmulatedMachine(0.25), hands.clocks)
    took_s = [hands.step(pace, k, n, 0.001, fixed_s=1.0)[1] for k, n in enumerate((1, 100, 1, 50))]
    assert took_s == [pytest.approx(4 * (1 + 0.001 * n)) for n in (1, 100, 1, 50)]


def test_gradients_leave_late() -> None:
    hands = Hands()
    pace = StretchedCompute(EmulatedMachine(0.25), hands.clocks)
    hands.step(pace, 0, 10, 0.3)
    sent_s, took_s = hands.step(pace, 1, 10, 0.3)
    assert sent_s >= took_s - 2.0 - 0.1 * 3 * 2.0 - 1e-9, "all but the backward pass and a tenth of its stretch is past"


def test_a_busy_machine_does_not_lengthen_the_sleep() -> None:
    idle, busy = Hands(), Hands(contention=3.0)
    for hands in (idle, busy):
        hands.step(StretchedCompute(EmulatedMachine(0.25), hands.clocks), 0, 10, 0.3)
    assert busy.now_s - idle.now_s == pytest.approx(2 * 3.0)


def test_a_step_that_was_given_up_leaves_nothing_behind() -> None:
    hands = Hands()
    pace = StretchedCompute(EmulatedMachine(0.25), hands.clocks)
    pace.begin(0)
    hands.work(1.0)
    pace.before_exchange(10, 10)
    hands.work(50.0)
    assert hands.step(pace, 0, 10, 0.3)[1] == pytest.approx(12.0)


def test_the_stretch_follows_the_schedule() -> None:
    hands = Hands()
    pace = StretchedCompute(EmulatedMachine(1.0, ((2, 0.25),)), hands.clocks)
    took_s = [hands.step(pace, k, 10, 0.3)[1] for k in range(4)]
    assert took_s == [pytest.approx(s) for s in (3.0, 3.0, 12.0, 12.0)]


def test_a_cost_is_kept_to_the_tick_whatever_the_real_work_is() -> None:
    told = parse("sample_s=1,fixed_s=2,1,0.5:0.25@2")
    assert told is not None
    hands = Hands(contention=2.0)
    pace = FixedStepCost(told, 1, hands.clocks)
    took_s = [hands.step(pace, k, n, 0.1 + 0.01 * k)[1] for k, n in enumerate((5, 10, 10, 0, 1))]
    assert took_s == [pytest.approx(s) for s in (12.0, 22.0, 42.0, 2.0, 6.0)]
    assert hands.step(pace, 5, 5, 0.1)[0] > 20.0, "most of it is before the gradients leave"


def test_a_cost_is_kept_by_a_machine_that_is_busy_now_and_then() -> None:
    told = parse("sample_s=1")
    assert told is not None
    hands = Hands()
    pace = FixedStepCost(told, 0, hands.clocks)
    took_s = [hands.step(pace, k, 10, sample_s)[1] for k, sample_s in enumerate((0.3, 0.6, 0.3, 0.6, 0.3))]
    assert took_s[0] == pytest.approx(10.0)
    assert took_s[2:] == [pytest.approx(10.0)] * 3, "after the first surprise there is none"


def test_pieces_of_a_share_are_stretched_together() -> None:
    hands = Hands()
    pace = StretchedCompute(EmulatedMachine(0.25), hands.clocks)
    for step in range(2):
        began_s = hands.now_s
        pace.begin(step)
        hands.work(1.0 + 2.0)
        hands.work(1.0)
        pace.before_exchange(20, 10)
        hands.work(2.0)
        pace.after_backward()
        assert hands.now_s - began_s == pytest.approx(4 * 6.0)


def test_work_that_takes_longer_than_its_cost_is_not_delayed() -> None:
    told = parse("sample_s=0.001")
    assert told is not None
    hands = Hands()
    assert hands.step(FixedStepCost(told, 0, hands.clocks), 0, 10, 0.3) == (pytest.approx(1.0), pytest.approx(3.0))


def test_a_member_as_fast_as_it_is_has_no_pace() -> None:
    assert slowdown_for("local/0", "") is None
    assert slowdown_for("local/0", "1,0.5") is None
    assert isinstance(slowdown_for("local/1", "1,0.5"), StretchedCompute)
    assert isinstance(slowdown_for("local/0", "1:0.5@9"), StretchedCompute)
    assert isinstance(slowdown_for("local/0", "sample_s=0.1,1,0.5"), FixedStepCost)


# --- what tests compare with


@given(st.lists(SPEEDS, min_size=1, max_size=3), st.integers(0, 12), st.floats(0, 0.1))
def test_no_other_shares_are_better_than_the_best(speeds: list[float], size: int, fixed_s: float) -> None:
    text = machines(*speeds, sample_s=0.002, fixed_s=fixed_s)
    best = best_shares(text, size, len(speeds))
    assert sum(best) == size
    every = [split for split in product(range(size + 1), repeat=len(speeds)) if sum(split) == size]
    assert step_s(text, best) == min(step_s(text, split) for split in every)


def test_the_best_shares_follow_the_schedule() -> None:
    text = machines(1, "1:0.25@10", sample_s=0.002)
    assert best_shares(text, 60, 2, step=9) == (30, 30)
    assert best_shares(text, 60, 2, step=10) == (48, 12)


def test_stretched_work_has_no_known_best() -> None:
    with pytest.raises(ValueError, match="sample_s"):
        best_shares("1,0.5", 60, 2)
