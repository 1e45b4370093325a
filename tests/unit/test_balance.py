from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from shoal.core.shares.balancer import ShareBalancer, ShareChange, ShareSettings, StepMeasurement, parse
from shoal.errors import BadPlan

AHEAD = 2
SETTLING_STEPS = 100


@dataclass
class Simulation:
    """Members of given speeds (samples a second) that do steps of one run, with noise and spikes if asked for."""

    speeds: list[float]
    size: int = 256
    rules: ShareSettings = field(default_factory=ShareSettings)
    fixed_s: float = 0.0
    noise: float = 0.0
    spikes: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.balance = ShareBalancer(self.rules, AHEAD)
        self.chance = random.Random(self.seed)
        self.step = 0
        self.step_s: list[float] = []
        self.changes: list[ShareChange] = []
        self.changed_at: list[int] = []
        self.shares: tuple[int, ...] = ()

    @property
    def names(self) -> list[str]:
        return [f"lab/{rank}" for rank in range(len(self.speeds))]

    def run(self, steps: int, each: Callable[[], None] = lambda: None) -> Simulation:
        for _ in range(steps):
            each()
            self.shares = self.balance.shares(self.step, self.size, self.names)
            times = [self.fixed_s + b / v if b else 0.0 for b, v in zip(self.shares, self.speeds, strict=True)]
            self.step_s.append(max(times))
            seen = [StepMeasurement(b, t * self._chance()) for b, t in zip(self.shares, times, strict=True)]
            change = self.balance.observe(self.step, self.names, seen)
            if change is not None:
                self.changes.append(change)
                self.changed_at.append(self.step)
            self.step += 1
        return self

    def _chance(self) -> float:
        spike = 5.0 if self.chance.random() < self.spikes else 1.0
        return math.exp(self.chance.gauss(0, self.noise)) * spike

    @property
    def best_s(self) -> float:
        return self.fixed_s + self.size / math.fsum(self.speeds)

    @property
    def equal_s(self) -> float:
        return self.fixed_s + self.size / len(self.speeds) / min(self.speeds)

    def gained(self, since: int) -> float:
        """The part of the gain over equal shares that could be had."""
        step_s = math.fsum(self.step_s[since:]) / len(self.step_s[since:])
        return (self.equal_s / step_s - 1) / (self.equal_s / self.best_s - 1)


# --- rules


def test_rules_are_read_from_settings() -> None:
    assert parse("model") == ShareSettings()
    assert parse("ratio", threshold=0.05, window=20).policy == "ratio"
    assert parse("fixed:3,1").weights == (3.0, 1.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"text": "modal"},
        {"text": "model:3"},
        {"text": "fixed:"},
        {"text": "model", "threshold": -0.1},
        {"text": "model", "threshold": math.nan},
        {"text": "model", "window": 0},
        {"text": "model", "min": -1},
        {"text": "model", "min": math.inf},
        {"text": "model", "max": 0},
        {"text": "model", "min": 0.5, "max": 0.25},
        {"text": "model", "min": 64, "max": 32},
        {"text": "model", "mode": "sometimes"},
    ],
)
def test_rules_that_make_no_sense_are_refused_with_a_remedy(settings: dict[str, object]) -> None:
    with pytest.raises(BadPlan) as caught:
        parse(**settings)  # type: ignore[arg-type]
    assert caught.value.do


def test_a_floor_above_the_cap_of_this_batch_is_refused() -> None:
    rules = parse("model", min=16, max=0.1)
    rules.check(1000)
    with pytest.raises(BadPlan) as caught:
        rules.check(100)
    assert "floor is 16 samples and the cap 10" in caught.value.why


# --- the policies that do not adapt


def test_equal_and_fixed_shares_never_change() -> None:
    assert Simulation([4, 1], rules=parse("equal")).run(40).shares == (128, 128)
    run = Simulation([1, 1], rules=parse("fixed:3,1")).run(40)
    assert run.shares == (192, 64)
    assert not run.changes


def test_fixed_shares_respect_a_cap_and_a_floor() -> None:
    assert ShareBalancer(parse("fixed:3,1", max=160)).shares(0, 256, ["a", "b"]) == (160, 96)
    assert ShareBalancer(parse("fixed:9,1", min=0.25)).shares(0, 256, ["a", "b"]) == (192, 64)


def test_a_cap_in_samples_is_never_broken_and_one_in_parts_gives_way() -> None:
    assert ShareBalancer(parse("equal", max=0.5)).shares(0, 256, ["a"]) == (256,)
    with pytest.raises(BadPlan, match="256 does not fit"):
        ShareBalancer(parse("equal", max=100)).shares(0, 256, ["a", "b"])


# --- before anything is measured


def test_without_a_hint_the_first_shares_are_equal() -> None:
    assert ShareBalancer().shares(0, 10, ["a", "b", "c"]) == (4, 3, 3)


def test_the_first_shares_follow_the_probes() -> None:
    balance = ShareBalancer()
    balance.set_speed_estimate("a", 3.0)
    balance.set_speed_estimate("b", 1.0)
    assert balance.shares(0, 64, ["a", "b"]) == (48, 16)


def test_a_member_without_a_probe_counts_as_the_usual_one() -> None:
    balance = ShareBalancer()
    balance.set_speed_estimate("a", 2.0)
    assert balance.shares(0, 64, ["a", "b"]) == (32, 32)


@pytest.mark.parametrize("speed", [0.0, -1.0, math.inf, math.nan])
def test_a_probe_that_makes_no_sense_is_ignored(speed: float) -> None:
    balance = ShareBalancer()
    balance.set_speed_estimate("a", speed)
    assert balance.shares(0, 64, ["a", "b"]) == (32, 32)


# --- following what is measured


def test_the_first_correction_comes_after_two_steps_and_says_why() -> None:
    run = Simulation([1000.0, 250.0], size=64).run(10)
    assert run.changed_at == [1]
    assert run.changes[0].step == 1 + 1 + AHEAD
    assert run.changes[0].shares == {"lab/0": 52, "lab/1": 12}
    assert run.changes[0].reason == (
        "lab/1 takes 4 ms a sample, the others 1 ms: 52, 12 instead of 32, 32; step 128 ms → 52 ms"
    )


def test_of_many_members_the_reason_names_those_whose_shares_change_the_most() -> None:
    run = Simulation([1000.0] * 39 + [250.0], size=40 * 16).run(10)
    reason = run.changes[0].reason
    assert reason.startswith("lab/39 takes 4 ms a sample, the others 1 ms: lab/39 4 instead of 16, lab/0 17 instead of")
    assert "more changes; step 64 ms → 17 ms" in reason
    assert len(reason) < 200


def test_shares_that_were_read_ahead_stay_as_they_are() -> None:
    balance, names = ShareBalancer(ahead=AHEAD), ["a", "b"]
    promised: dict[int, tuple[int, ...]] = {}
    for step in range(60):
        for later in range(step, step + AHEAD + 1):
            shares = balance.shares(later, 64, names)
            assert promised.setdefault(later, shares) == shares
        speeds = (4, 1) if step < 30 else (1, 4)
        balance.observe(step, names, [StepMeasurement(b, b / v) for b, v in zip(promised[step], speeds, strict=True)])
    assert promised[59] in ((12, 52), (13, 51))


@pytest.mark.parametrize("speeds", [[8, 1], [4, 1], [2, 1], [8, 4, 2, 1], [8, 8, 4, 4, 2, 2, 1, 1]])
@pytest.mark.parametrize("fixed_s", [0.0, 10.0])
def test_nearly_all_of_the_gain_is_had(speeds: list[float], fixed_s: float) -> None:
    assert Simulation(speeds, fixed_s=fixed_s).run(200).gained(since=40) >= 0.95


@pytest.mark.parametrize("speeds", [[8, 1], [4, 1], [2, 1], [8, 4, 2, 1]])
def test_nearly_all_of_the_gain_is_had_in_spite_of_noise(speeds: list[float]) -> None:
    gained = [
        Simulation(speeds, noise=0.1, spikes=0.01, seed=seed).run(400).gained(since=SETTLING_STEPS)
        for seed in range(10)
    ]
    assert math.fsum(gained) / len(gained) >= 0.95


@pytest.mark.parametrize("speeds", [[1, 1], [4, 1], [8, 4, 2, 1], [1] * 8])
@pytest.mark.parametrize("fixed_s", [0.0, 10.0])
def test_noise_does_not_make_shares_oscillate(speeds: list[float], fixed_s: float) -> None:
    for seed in range(8):
        run = Simulation(speeds, fixed_s=fixed_s, noise=0.1, spikes=0.01, seed=seed).run(SETTLING_STEPS + 200)
        assert sum(step >= SETTLING_STEPS for step in run.changed_at) <= 2


def test_single_spikes_change_nothing() -> None:
    run = Simulation([2, 1]).run(50)
    settled = run.shares
    for _ in range(10):
        run.speeds[0] = 0.02
        run.run(1)
        run.speeds[0] = 2
        run.run(19)
    assert run.shares == settled


@pytest.mark.parametrize(("factor", "rank"), [(0.25, 0), (4.0, 1), (0.25, 1), (4.0, 0)])
def test_a_speed_that_flips_is_followed_within_bounds(factor: float, rank: int) -> None:
    """The first change is decided within 4 steps, holds after those read ahead, and 20 steps later all is well."""
    for seed in range(5):
        run = Simulation([4, 1, 2], noise=0.05, seed=seed).run(150)
        run.speeds[rank] *= factor
        run.run(4)
        assert run.changed_at[-1] >= 150
        run.run(AHEAD + 20).run(20)
        assert math.fsum(run.step_s[-20:]) / 20 <= 1.07 * run.best_s


def test_a_slow_drift_is_followed_too() -> None:
    run = Simulation([2, 2], noise=0.03)

    def fade() -> None:
        run.speeds[1] *= 0.998

    run.run(400, each=fade)
    assert run.step_s[-1] <= 1.08 * run.best_s


def test_a_change_that_makes_steps_slower_is_taken_back() -> None:
    balance, names = ShareBalancer(), ["a", "b"]

    def seconds(rank: int, share: int) -> float:
        cliff = 3.0 if rank == 0 and share > 40 else 1.0  # As if caches overflowed.
        return cliff * share * (1.0, 2.0)[rank]

    reasons = []
    for step in range(60):
        shares = balance.shares(step, 64, names)
        seen = [StepMeasurement(b, seconds(rank, b)) for rank, b in enumerate(shares)]
        change = balance.observe(step, names, seen)
        reasons += [change.reason] if change is not None else []
    assert seconds(0, shares[0]) <= 64
    assert len(reasons) <= 6


def test_where_nothing_better_is_foreseen_the_best_shares_so_far_come_back() -> None:
    balance, names = ShareBalancer(), ["a", "b"]
    reasons = []
    for step in range(80):
        shares = balance.shares(step, 64, names)
        seconds = (3.0 if shares[0] > 32 else 1.0) * shares[0], 3.0 * shares[1]
        change = balance.observe(step, names, [StepMeasurement(b, s) for b, s in zip(shares, seconds, strict=True)])
        reasons += [change.reason] if change is not None else []
    assert "the last change made steps slower" in reasons[-1]
    assert shares == (32, 32)


def test_nothing_changes_for_the_last_steps() -> None:
    balance, names = ShareBalancer(), ["a", "b"]
    for step in range(20):
        shares = balance.shares(step, 64, names)
        seen = [StepMeasurement(b, b / v) for b, v in zip(shares, (4, 1), strict=True)]
        assert balance.observe(step, names, seen, left=1) is None


def test_after_the_first_corrections_nobody_loses_more_than_half_of_its_share_at_once() -> None:
    balance, names = ShareBalancer(parse("model", mode="epoch")), ["a", "b", "c", "d"]
    for step in range(101):
        speeds = (1, 1, 1, 1) if step < 70 else (1, 1, 1, 100)
        shares = balance.shares(step, 256, names)
        seen = [StepMeasurement(b, b / v) for b, v in zip(shares, speeds, strict=True)]
        balance.observe(step, names, seen, epoch=step // 50)
    assert balance.shares(101, 256, names) == (32, 32, 32, 160)


# --- modes


def test_once_settles_and_then_leaves_it() -> None:
    run = Simulation([4, 1], rules=parse("model", mode="once")).run(60)
    settled = run.shares
    assert settled == pytest.approx((205, 51), abs=3)
    run.speeds.reverse()
    assert run.run(200).shares == settled


def test_by_epoch_shares_change_at_the_start_of_an_epoch_only() -> None:
    balance, names, changed_at = ShareBalancer(parse("model", mode="epoch")), ["a", "b"], []
    for step in range(200):
        shares = balance.shares(step, 64, names)
        speeds = (4, 1) if step < 70 else (1, 4)
        seen = [StepMeasurement(b, b / v) for b, v in zip(shares, speeds, strict=True)]
        if balance.observe(step, names, seen, epoch=step // 50) is not None:
            changed_at.append(step)
    assert changed_at[0] < 20
    assert [step for step in changed_at if step >= 20] == [100]


def test_the_ratio_law_follows_speeds_with_a_dead_band() -> None:
    run = Simulation([3, 1], size=64, rules=parse("ratio", threshold=0.05)).run(60)
    assert run.shares == (48, 16)
    assert not Simulation([1.0, 1.04], size=64, rules=parse("ratio", threshold=0.05)).run(60).changes


# --- floors, caps, limits, parking


def test_floor_and_cap_bound_every_share() -> None:
    assert Simulation([20, 1], rules=parse("model", min=0.125)).run(60).shares == (224, 32)
    assert Simulation([20, 1], rules=parse("model", max=160)).run(60).shares == (160, 96)


def test_a_limit_holds_from_the_next_step_on() -> None:
    run = Simulation([4, 1]).run(30)
    run.balance.set_limit("lab/0", 100)
    assert run.run(1).shares == (100, 156)
    assert run.run(60).shares == (100, 156)


def test_limits_below_the_batch_are_refused() -> None:
    balance = ShareBalancer()
    balance.set_limit("a", 100)
    balance.set_limit("b", 100)
    with pytest.raises(BadPlan, match="256 does not fit"):
        balance.shares(0, 256, ["a", "b"])


def test_micro_batches_are_part_of_the_cost() -> None:
    balance, names = ShareBalancer(), ["a", "b"]
    balance.set_micro_batch("a", 16)
    for step in range(80):
        shares = balance.shares(step, 64, names)
        a_s, b_s = math.ceil(shares[0] / 16) * 1.0 + shares[0] * 0.01, 1.0 + shares[1] * 0.05
        balance.observe(step, names, [StepMeasurement(shares[0], a_s), StepMeasurement(shares[1], b_s)])
    assert shares[0] == 32


def test_a_member_that_costs_more_than_it_brings_is_parked_and_tried_again_when_it_is_cheap() -> None:
    run = Simulation([100.0, 100.0, 0.5], size=64).run(150)
    assert run.shares[2] == 0
    tried = []

    def note() -> None:
        if run.balance.shares(run.step, 64, run.names)[2]:
            tried.append(run.step)

    run.run(2000, each=note)
    assert 1 <= len(tried) <= 10
    wasted_s = sum(run.step_s[step] for step in tried)
    assert wasted_s <= 0.02 * math.fsum(run.step_s)


def test_a_parked_member_that_has_become_fast_comes_back() -> None:
    run = Simulation([100.0, 100.0, 0.5], size=64).run(150)
    run.speeds[2] = 100.0
    run.run(1200)
    assert max(run.shares) - min(run.shares) <= 4


def test_a_parked_member_is_tried_with_two_samples_where_one_alone_is_not_allowed() -> None:
    run = Simulation([100.0, 100.0, 0.5], size=64)
    run.balance.allow_single_sample = False
    run.run(150)
    assert run.shares[2] == 0
    run.speeds[2] = 100.0
    tried = []
    run.run(1200, each=lambda: tried.append(run.balance.shares(run.step, 64, run.names)[2]))
    assert 1 not in tried
    assert max(run.shares) - min(run.shares) <= 4


# --- members come and go


def names_of(shares: Sequence[int], names: Sequence[str]) -> dict[str, int]:
    return dict(zip(names, shares, strict=True))


def test_when_a_member_leaves_the_others_split_at_once_by_what_is_known() -> None:
    run = Simulation([4, 2, 1], size=70).run(40)
    assert run.balance.shares(40, 70, ["lab/0", "lab/2"]) == pytest.approx((56, 14), abs=1)


def test_where_shares_hardly_matter_noise_does_not_make_them_uneven_when_members_change() -> None:
    for seed in range(5):
        run = Simulation([500.0] * 3, size=48, fixed_s=0.4, noise=0.05, seed=seed).run(20)
        everybody = run.names
        for lost in range(8):
            left = [name for rank, name in enumerate(everybody) if rank != lost % 3]
            for step in range(run.step, run.step + 4):
                shares = run.balance.shares(step, 48, left)
                seen = [StepMeasurement(b, (0.35 + b / 500) * math.exp(run.chance.gauss(0, 0.05))) for b in shares]
                run.balance.observe(step, left, seen)
            run.step += 4
            assert min(run.run(20).shares) >= 8


def test_ranks_may_change_without_the_shares_of_members() -> None:
    run = Simulation([4, 2, 1], size=70).run(40)
    before = names_of(run.balance.shares(40, 70, run.names), run.names)
    turned = run.names[::-1]
    after = names_of(run.balance.shares(40, 70, turned), turned)
    assert all(abs(before[name] - after[name]) <= 1 for name in before)


def test_a_newcomer_counts_as_the_usual_member_until_it_is_measured() -> None:
    run = Simulation([1, 1], size=90).run(40)
    run.speeds.append(4)
    assert run.balance.shares(40, 90, run.names) == (30, 30, 30)
    assert run.run(20).shares == (15, 15, 60)


def test_a_newcomer_with_a_probe_is_compared_with_the_others() -> None:
    run = Simulation([1, 1], size=90)
    for name in run.names:
        run.balance.set_speed_estimate(name, 10.0)
    run.run(40)
    run.balance.set_speed_estimate("lab/2", 40.0)
    assert run.balance.shares(40, 90, [*run.names, "lab/2"]) == (15, 15, 60)


def test_a_member_that_comes_back_is_remembered() -> None:
    run = Simulation([4, 1], size=50).run(40)
    run.balance.observe(40, ["lab/0"], [StepMeasurement(50, 12.5)])
    assert run.balance.shares(41, 50, ["lab/0", "lab/1"]) == pytest.approx((40, 10), abs=1)


def test_a_ghost_has_no_share_and_the_others_keep_their_balance() -> None:
    run = Simulation([4, 2, 1], size=60).run(40)
    shares = run.balance.shares(40, 60, run.names, ghosts=(2,))
    assert shares == pytest.approx((40, 20, 0), abs=1)
    assert shares[2] == 0


def test_a_short_last_batch_is_scaled_down() -> None:
    run = Simulation([4, 1], size=100).run(40)
    assert run.balance.shares(41, 10, run.names) == (8, 2)
    assert run.balance.shares(42, 1, run.names) == (1, 0)


def test_a_larger_global_batch_is_split_by_the_same_speeds() -> None:
    run = Simulation([4, 1], size=100).run(40)
    run.size = 200
    assert run.run(1).shares == pytest.approx((160, 40), abs=2)
    assert sum(run.run(30).shares) == 200


def test_a_smaller_global_batch_is_taken_for_the_new_one_after_a_while() -> None:
    run = Simulation([4, 1], size=200, fixed_s=20.0).run(60)
    run.size = 50
    run.run(60)
    assert sum(run.shares) == 50
    assert run.balance.state_dict()["plan"][1] == 50
    assert run.step_s[-1] <= 1.05 * run.best_s


# --- state


def test_state_is_small_and_plain_and_goes_on_where_it_was() -> None:
    run = Simulation([8, 4, 4, 2, 2, 1, 1, 1], noise=0.1, spikes=0.01).run(75)
    text = json.dumps(run.balance.state_dict())
    assert len(text) < 12_000
    twin = ShareBalancer(run.rules, AHEAD)
    twin.load_state_dict(json.loads(text))
    for step in range(75, 200):
        shares = run.balance.shares(step, 256, run.names)
        assert twin.shares(step, 256, run.names) == shares
        seen = [
            StepMeasurement(b, b / v * run.chance.lognormvariate(0, 0.1))
            for b, v in zip(shares, run.speeds, strict=True)
        ]
        assert run.balance.observe(step, run.names, seen) == twin.observe(step, run.names, seen)


def test_the_memory_of_members_that_left_is_bounded() -> None:
    balance = ShareBalancer()
    for number in range(200):
        names = ["stays", f"guest/{number}"]
        balance.observe(number, names, [StepMeasurement(b, 0.1 * b) for b in balance.shares(number, 8, names)])
    assert len(balance.state_dict()["speeds"]["members"]) <= 20


def test_figures_tell_what_balancing_saves() -> None:
    figures = Simulation([4, 1], size=100).run(40).balance.stats()
    assert figures.sample_s == pytest.approx({"lab/0": 0.25, "lab/1": 1.0}, rel=0.05)
    assert figures.step_s == pytest.approx(20, rel=0.05)
    assert figures.idle < 0.03
    assert figures.idle_if_equal == pytest.approx(0.375, abs=0.03)


def test_before_anything_is_known_there_are_no_figures() -> None:
    assert ShareBalancer().stats().sample_s == {}


@pytest.mark.parametrize("noise", [0.001, 0.02])
def test_a_member_that_was_slow_for_a_while_gets_all_of_its_share_back(noise: float) -> None:
    balance, chance, names, size = ShareBalancer(), random.Random(5), ("a", "b"), 64
    for step in range(600):
        speeds = (1.0, 0.25 if 100 <= step < 300 else 1.0)
        shares = balance.shares(step, size, names)
        took = [(0.005 + 0.001 * n / s) * (1 + chance.gauss(0, noise)) for n, s in zip(shares, speeds, strict=True)]
        balance.observe(step, names, [StepMeasurement(n, t) for n, t in zip(shares, took, strict=True)])
    best_s = 0.005 + 0.001 * 32
    assert 0.005 + 0.001 * max(balance.shares(600, size, names)) <= 1.03 * best_s


def test_a_member_that_comes_back_to_a_run_of_fixed_costs_is_not_left_out_for_a_small_gain() -> None:
    for seed in range(10):
        balance, chance = ShareBalancer(), random.Random(seed)
        for step in range(200):
            names = ("a", "b") if 100 <= step < 150 else ("a", "b", "c")
            shares = balance.shares(step, 24, names, (2,) if step == 150 else ())
            fixed_s = {"a": 0.5, "b": 0.5, "c": 0.53}
            took = [
                (fixed_s[m] + 0.002 * n) * (1 + abs(chance.gauss(0, 0.05))) for m, n in zip(names, shares, strict=True)
            ]
            balance.observe(step, names, [StepMeasurement(n, t) for n, t in zip(shares, took, strict=True)])
            assert step == 150 or 0 not in shares, (seed, step, shares)
