from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from shoal.core.shares.balancer import ShareBalancer, ShareChange, ShareSettings, StepMeasurement, parse

AHEAD = 2
SETTLING_STEPS = 100


@dataclass
class Simulation:
    """Members of given speeds (samples per second) that train one run, with optional noise and spikes."""

    speeds: list[float]
    size: int = 256
    settings: ShareSettings = field(default_factory=ShareSettings)
    fixed_s: float = 0.0
    noise: float = 0.0
    spikes: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.balancer = ShareBalancer(self.settings, AHEAD)
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
            self.shares = self.balancer.shares(self.step, self.size, self.names)
            times = [self.fixed_s + b / v if b else 0.0 for b, v in zip(self.shares, self.speeds, strict=True)]
            self.step_s.append(max(times))
            measurements = [StepMeasurement(b, t * self._chance()) for b, t in zip(self.shares, times, strict=True)]
            change = self.balancer.observe(self.step, self.names, measurements)
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
        """Return which part of the possible gain over equal shares was reached."""
        step_s = math.fsum(self.step_s[since:]) / len(self.step_s[since:])
        return (self.equal_s / step_s - 1) / (self.equal_s / self.best_s - 1)


# --- the policies that do not adapt


def test_equal_and_fixed_shares_never_change() -> None:
    assert Simulation([4, 1], settings=parse("equal")).run(40).shares == (128, 128)
    run = Simulation([1, 1], settings=parse("fixed:3,1")).run(40)
    assert run.shares == (192, 64)
    assert not run.changes


def test_fixed_shares_respect_min_and_max() -> None:
    assert ShareBalancer(parse("fixed:3,1", max=160)).shares(0, 256, ["a", "b"]) == (160, 96)
    assert ShareBalancer(parse("fixed:9,1", min=0.25)).shares(0, 256, ["a", "b"]) == (192, 64)


def test_max_gives_way_when_too_few_members_are_left_for_the_batch() -> None:
    assert ShareBalancer(parse("equal", max=0.5)).shares(0, 256, ["a"]) == (256,)
    assert ShareBalancer(parse("equal", max=100)).shares(0, 256, ["a", "b", "c"]) == (86, 85, 85)
    assert ShareBalancer(parse("equal", max=100)).shares(0, 256, ["a", "b"]) == (128, 128)


# --- before any measurement


def test_first_shares_are_equal_without_estimates() -> None:
    assert ShareBalancer().shares(0, 10, ["a", "b", "c"]) == (4, 3, 3)


def test_first_shares_follow_the_estimates() -> None:
    balancer = ShareBalancer()
    balancer.set_speed_estimate("a", 3.0)
    balancer.set_speed_estimate("b", 1.0)
    assert balancer.shares(0, 64, ["a", "b"]) == (48, 16)


def test_member_without_an_estimate_counts_as_typical() -> None:
    balancer = ShareBalancer()
    balancer.set_speed_estimate("a", 2.0)
    assert balancer.shares(0, 64, ["a", "b"]) == (32, 32)


@pytest.mark.parametrize("speed", [0.0, -1.0, math.inf, math.nan])
def test_implausible_estimate_is_ignored(speed: float) -> None:
    balancer = ShareBalancer()
    balancer.set_speed_estimate("a", speed)
    assert balancer.shares(0, 64, ["a", "b"]) == (32, 32)


# --- adapting to measurements


def test_first_change_comes_after_two_steps_with_a_reason() -> None:
    run = Simulation([1000.0, 250.0], size=64).run(10)
    assert run.changed_at == [1]
    assert run.changes[0].step == 1 + 1 + AHEAD
    assert run.changes[0].shares == {"lab/0": 52, "lab/1": 12}
    assert run.changes[0].reason == (
        "lab/1 takes 4 ms a sample, the others 1 ms: 52, 12 instead of 32, 32; step 128 ms → 52 ms"
    )


def test_reason_names_the_largest_changes_of_many_members() -> None:
    run = Simulation([1000.0] * 39 + [250.0], size=40 * 16).run(10)
    reason = run.changes[0].reason
    assert reason.startswith("lab/39 takes 4 ms a sample, the others 1 ms: lab/39 4 instead of 16, lab/0 17 instead of")
    assert "more changes; step 64 ms → 17 ms" in reason
    assert len(reason) < 200


def test_shares_of_steps_read_ahead_never_change() -> None:
    balancer, names = ShareBalancer(ahead=AHEAD), ["a", "b"]
    promised: dict[int, tuple[int, ...]] = {}
    for step in range(60):
        for later in range(step, step + AHEAD + 1):
            shares = balancer.shares(later, 64, names)
            assert promised.setdefault(later, shares) == shares
        speeds = (4, 1) if step < 30 else (1, 4)
        balancer.observe(step, names, [StepMeasurement(b, b / v) for b, v in zip(promised[step], speeds, strict=True)])
    assert promised[59] in ((12, 52), (13, 51))


@pytest.mark.parametrize("speeds", [[8, 1], [4, 1], [2, 1], [8, 4, 2, 1], [8, 8, 4, 4, 2, 2, 1, 1]])
@pytest.mark.parametrize("fixed_s", [0.0, 10.0])
def test_nearly_all_of_the_possible_gain_is_reached(speeds: list[float], fixed_s: float) -> None:
    assert Simulation(speeds, fixed_s=fixed_s).run(200).gained(since=40) >= 0.95


@pytest.mark.parametrize("speeds", [[8, 1], [4, 1], [2, 1], [8, 4, 2, 1]])
def test_nearly_all_of_the_possible_gain_is_reached_despite_noise(speeds: list[float]) -> None:
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
def test_changed_speed_is_followed_within_bounds(factor: float, rank: int) -> None:
    """A change is decided within 4 steps; 20 steps after it holds, steps are nearly as short as possible."""
    for seed in range(5):
        run = Simulation([4, 1, 2], noise=0.05, seed=seed).run(150)
        run.speeds[rank] *= factor
        run.run(4)
        assert run.changed_at[-1] >= 150
        run.run(AHEAD + 20).run(20)
        assert math.fsum(run.step_s[-20:]) / 20 <= 1.07 * run.best_s


def test_slow_drift_is_followed() -> None:
    run = Simulation([2, 2], noise=0.03)

    def fade() -> None:
        run.speeds[1] *= 0.998

    run.run(400, each=fade)
    assert run.step_s[-1] <= 1.08 * run.best_s


def test_change_that_makes_steps_slower_is_reverted() -> None:
    balancer, names = ShareBalancer(), ["a", "b"]

    def seconds(rank: int, share: int) -> float:
        cliff = 3.0 if rank == 0 and share > 40 else 1.0  # As if caches overflowed.
        return cliff * share * (1.0, 2.0)[rank]

    reasons = []
    for step in range(60):
        shares = balancer.shares(step, 64, names)
        measurements = [StepMeasurement(b, seconds(rank, b)) for rank, b in enumerate(shares)]
        change = balancer.observe(step, names, measurements)
        reasons += [change.reason] if change is not None else []
    assert seconds(0, shares[0]) <= 64
    assert len(reasons) <= 6


def test_best_shares_return_if_nothing_better_is_predicted() -> None:
    balancer, names = ShareBalancer(), ["a", "b"]
    reasons = []
    for step in range(80):
        shares = balancer.shares(step, 64, names)
        seconds = (3.0 if shares[0] > 32 else 1.0) * shares[0], 3.0 * shares[1]
        change = balancer.observe(step, names, [StepMeasurement(b, s) for b, s in zip(shares, seconds, strict=True)])
        reasons += [change.reason] if change is not None else []
    assert "the last change made steps slower" in reasons[-1]
    assert shares == (32, 32)


def test_shares_do_not_change_for_the_last_steps() -> None:
    balancer, names = ShareBalancer(), ["a", "b"]
    for step in range(20):
        shares = balancer.shares(step, 64, names)
        measurements = [StepMeasurement(b, b / v) for b, v in zip(shares, (4, 1), strict=True)]
        assert balancer.observe(step, names, measurements, steps_left=1) is None


def test_share_at_most_halves_after_the_first_windows() -> None:
    balancer, names = ShareBalancer(parse("model", mode="epoch")), ["a", "b", "c", "d"]
    for step in range(101):
        speeds = (1, 1, 1, 1) if step < 70 else (1, 1, 1, 100)
        shares = balancer.shares(step, 256, names)
        measurements = [StepMeasurement(b, b / v) for b, v in zip(shares, speeds, strict=True)]
        balancer.observe(step, names, measurements, epoch=step // 50)
    assert balancer.shares(101, 256, names) == (32, 32, 32, 160)


# --- modes


def test_mode_once_settles_and_then_keeps_its_shares() -> None:
    run = Simulation([4, 1], settings=parse("model", mode="once")).run(60)
    settled = run.shares
    assert settled == pytest.approx((205, 51), abs=3)
    run.speeds.reverse()
    assert run.run(200).shares == settled


def test_mode_epoch_changes_shares_only_at_the_start_of_an_epoch() -> None:
    balancer, names, changed_at = ShareBalancer(parse("model", mode="epoch")), ["a", "b"], []
    for step in range(200):
        shares = balancer.shares(step, 64, names)
        speeds = (4, 1) if step < 70 else (1, 4)
        measurements = [StepMeasurement(b, b / v) for b, v in zip(shares, speeds, strict=True)]
        if balancer.observe(step, names, measurements, epoch=step // 50) is not None:
            changed_at.append(step)
    assert changed_at[0] < 20
    assert [step for step in changed_at if step >= 20] == [100]


def test_ratio_law_follows_speeds_with_a_dead_band() -> None:
    run = Simulation([3, 1], size=64, settings=parse("ratio", threshold=0.05)).run(60)
    assert run.shares == (48, 16)
    assert not Simulation([1.0, 1.04], size=64, settings=parse("ratio", threshold=0.05)).run(60).changes


# --- bounds, limits, parking


def test_min_and_max_bound_every_share() -> None:
    assert Simulation([20, 1], settings=parse("model", min=0.125)).run(60).shares == (224, 32)
    assert Simulation([20, 1], settings=parse("model", max=160)).run(60).shares == (160, 96)


def test_declared_maximum_holds_for_its_machine() -> None:
    run = Simulation([4, 1], settings=parse("model", machines="lab/0 max=100"))
    assert run.run(1).shares == (100, 156)
    assert run.run(60).shares == (100, 156)


def test_maxima_below_the_batch_give_way_in_proportion() -> None:
    balancer = ShareBalancer(parse("equal", machines="a max=40, b max=120"))
    assert balancer.shares(0, 256, ["a", "b"]) == (64, 192)


def test_bounds_that_cannot_be_kept_are_said_once() -> None:
    balancer = ShareBalancer(parse("equal", max=20, min=16))
    balancer.min_members = 2

    def said(step: int, members: list[str], size: int = 64) -> str:
        shares = balancer.shares(step, size, members)
        balancer.observe(step, members, [StepMeasurement(share, share * 0.1) for share in shares])
        return balancer.newly_overruled_bounds(size, members)

    assert said(0, list("abcd")) == (
        "with fewer than 4 members (MIN is 2) shares will exceed shares.max=20, in micro-batches that do not"
    )
    assert said(1, list("abcd")) == ""
    assert said(2, list("abcd"), size=8) == "", "the short last batch of an epoch"
    assert said(3, list("abc")).startswith("the largest shares of 3 members sum to 60 of 64 samples")
    assert said(4, list("abc")) == ""
    assert said(5, list("abcde")).endswith("shares.min=16 of 5 members exceeds the batch of 64: shares are smaller")


def test_bounds_that_cannot_be_kept_are_known_before_the_first_step() -> None:
    balancer = ShareBalancer(parse("equal", max=20))
    assert balancer.newly_overruled_bounds(64, list("abcd")).startswith("with fewer than 4 members (MIN is 1)")
    assert balancer.newly_overruled_bounds(0, list("abcd")) == "", "shares that are not counted in samples"


def test_micro_batches_are_part_of_the_cost() -> None:
    balancer, names = ShareBalancer(), ["a", "b"]
    balancer.set_micro_batch("a", 16)
    for step in range(80):
        shares = balancer.shares(step, 64, names)
        a_s, b_s = math.ceil(shares[0] / 16) * 1.0 + shares[0] * 0.01, 1.0 + shares[1] * 0.05
        balancer.observe(step, names, [StepMeasurement(shares[0], a_s), StepMeasurement(shares[1], b_s)])
    assert shares[0] == 32


def test_member_that_only_slows_steps_down_is_parked_and_probed_cheaply() -> None:
    run = Simulation([100.0, 100.0, 0.5], size=64).run(150)
    assert run.shares[2] == 0
    probed = []

    def record_probe() -> None:
        if run.balancer.shares(run.step, 64, run.names)[2]:
            probed.append(run.step)

    run.run(2000, each=record_probe)
    assert 1 <= len(probed) <= 10
    wasted_s = sum(run.step_s[step] for step in probed)
    assert wasted_s <= 0.02 * math.fsum(run.step_s)


def test_parked_member_that_became_fast_gets_a_share_again() -> None:
    run = Simulation([100.0, 100.0, 0.5], size=64).run(150)
    run.speeds[2] = 100.0
    run.run(1200)
    assert max(run.shares) - min(run.shares) <= 4


def test_parked_member_is_probed_with_two_samples_if_one_is_not_allowed() -> None:
    run = Simulation([100.0, 100.0, 0.5], size=64)
    run.balancer.allow_single_sample = False
    run.run(150)
    assert run.shares[2] == 0
    run.speeds[2] = 100.0
    probed = []
    run.run(1200, each=lambda: probed.append(run.balancer.shares(run.step, 64, run.names)[2]))
    assert 1 not in probed
    assert max(run.shares) - min(run.shares) <= 4


# --- changing members


def names_of(shares: Sequence[int], names: Sequence[str]) -> dict[str, int]:
    return dict(zip(names, shares, strict=True))


def test_remaining_members_split_by_known_speeds_when_one_leaves() -> None:
    run = Simulation([4, 2, 1], size=70).run(40)
    assert run.balancer.shares(40, 70, ["lab/0", "lab/2"]) == pytest.approx((56, 14), abs=1)


def test_noise_does_not_make_shares_uneven_if_they_hardly_matter() -> None:
    for seed in range(5):
        run = Simulation([500.0] * 3, size=48, fixed_s=0.4, noise=0.05, seed=seed).run(20)
        all_names = run.names
        for lost in range(8):
            remaining = [name for rank, name in enumerate(all_names) if rank != lost % 3]
            for step in range(run.step, run.step + 4):
                shares = run.balancer.shares(step, 48, remaining)
                measurements = [
                    StepMeasurement(b, (0.35 + b / 500) * math.exp(run.chance.gauss(0, 0.05))) for b in shares
                ]
                run.balancer.observe(step, remaining, measurements)
            run.step += 4
            assert min(run.run(20).shares) >= 8


def test_members_keep_their_shares_when_ranks_change() -> None:
    run = Simulation([4, 2, 1], size=70).run(40)
    before = names_of(run.balancer.shares(40, 70, run.names), run.names)
    reversed_names = run.names[::-1]
    after = names_of(run.balancer.shares(40, 70, reversed_names), reversed_names)
    assert all(abs(before[name] - after[name]) <= 1 for name in before)


def test_newcomer_counts_as_typical_until_measured() -> None:
    run = Simulation([1, 1], size=90).run(40)
    run.speeds.append(4)
    assert run.balancer.shares(40, 90, run.names) == (30, 30, 30)
    assert run.run(20).shares == (15, 15, 60)


def test_newcomer_with_an_estimate_is_compared_with_the_others() -> None:
    run = Simulation([1, 1], size=90)
    for name in run.names:
        run.balancer.set_speed_estimate(name, 10.0)
    run.run(40)
    run.balancer.set_speed_estimate("lab/2", 40.0)
    assert run.balancer.shares(40, 90, [*run.names, "lab/2"]) == (15, 15, 60)


def test_returning_member_is_remembered() -> None:
    run = Simulation([4, 1], size=50).run(40)
    run.balancer.observe(40, ["lab/0"], [StepMeasurement(50, 12.5)])
    assert run.balancer.shares(41, 50, ["lab/0", "lab/1"]) == pytest.approx((40, 10), abs=1)


def test_rank_that_is_catching_up_has_no_share() -> None:
    run = Simulation([4, 2, 1], size=60).run(40)
    shares = run.balancer.shares(40, 60, run.names, catching_up=(2,))
    assert shares == pytest.approx((40, 20, 0), abs=1)
    assert shares[2] == 0


def test_short_last_batch_is_scaled_down() -> None:
    run = Simulation([4, 1], size=100).run(40)
    assert run.balancer.shares(41, 10, run.names) == (8, 2)
    assert run.balancer.shares(42, 1, run.names) == (1, 0)


def test_larger_global_batch_is_split_by_the_same_speeds() -> None:
    run = Simulation([4, 1], size=100).run(40)
    run.size = 200
    assert run.run(1).shares == pytest.approx((160, 40), abs=2)
    assert sum(run.run(30).shares) == 200


def test_lasting_smaller_global_batch_is_adopted() -> None:
    run = Simulation([4, 1], size=200, fixed_s=20.0).run(60)
    run.size = 50
    run.run(60)
    assert sum(run.shares) == 50
    assert run.balancer.state_dict()["plan"][1] == 50
    assert run.step_s[-1] <= 1.05 * run.best_s


# --- state


def test_state_is_small_plain_and_continues_identically() -> None:
    run = Simulation([8, 4, 4, 2, 2, 1, 1, 1], noise=0.1, spikes=0.01).run(75)
    text = json.dumps(run.balancer.state_dict())
    assert len(text) < 12_000
    twin = ShareBalancer(run.settings, AHEAD)
    twin.load_state_dict(json.loads(text))
    for step in range(75, 200):
        shares = run.balancer.shares(step, 256, run.names)
        assert twin.shares(step, 256, run.names) == shares
        measurements = [
            StepMeasurement(b, b / v * run.chance.lognormvariate(0, 0.1))
            for b, v in zip(shares, run.speeds, strict=True)
        ]
        assert run.balancer.observe(step, run.names, measurements) == twin.observe(step, run.names, measurements)


def test_number_of_remembered_former_members_is_bounded() -> None:
    balancer = ShareBalancer()
    for number in range(200):
        names = ["stays", f"other/{number}"]
        balancer.observe(number, names, [StepMeasurement(b, 0.1 * b) for b in balancer.shares(number, 8, names)])
    assert len(balancer.state_dict()["speeds"]["members"]) <= 20


def test_stats_show_what_balancing_saves() -> None:
    stats = Simulation([4, 1], size=100).run(40).balancer.stats()
    assert stats.sample_s == pytest.approx({"lab/0": 0.25, "lab/1": 1.0}, rel=0.05)
    assert stats.step_s == pytest.approx(20, rel=0.05)
    assert stats.idle < 0.03
    assert stats.idle_if_equal == pytest.approx(0.375, abs=0.03)


def test_stats_are_empty_before_any_measurement() -> None:
    assert ShareBalancer().stats().sample_s == {}


@pytest.mark.parametrize("noise", [0.001, 0.02])
def test_member_that_was_slow_for_a_while_regains_its_share(noise: float) -> None:
    balancer, chance, names, size = ShareBalancer(), random.Random(5), ("a", "b"), 64
    for step in range(600):
        speeds = (1.0, 0.25 if 100 <= step < 300 else 1.0)
        shares = balancer.shares(step, size, names)
        took = [(0.005 + 0.001 * n / s) * (1 + chance.gauss(0, noise)) for n, s in zip(shares, speeds, strict=True)]
        balancer.observe(step, names, [StepMeasurement(n, t) for n, t in zip(shares, took, strict=True)])
    best_s = 0.005 + 0.001 * 32
    assert 0.005 + 0.001 * max(balancer.shares(600, size, names)) <= 1.03 * best_s


def test_returning_member_is_not_parked_for_a_small_gain() -> None:
    for seed in range(10):
        balancer, chance = ShareBalancer(), random.Random(seed)
        for step in range(200):
            names = ("a", "b") if 100 <= step < 150 else ("a", "b", "c")
            shares = balancer.shares(step, 24, names, (2,) if step == 150 else ())
            fixed_s = {"a": 0.5, "b": 0.5, "c": 0.53}
            took = [
                (fixed_s[m] + 0.002 * n) * (1 + abs(chance.gauss(0, 0.05))) for m, n in zip(names, shares, strict=True)
            ]
            balancer.observe(step, names, [StepMeasurement(n, t) for n, t in zip(shares, took, strict=True)])
            assert step == 150 or 0 not in shares, (seed, step, shares)
