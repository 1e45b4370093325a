"""How long and when an emulated member sleeps, on simulated clocks."""

from __future__ import annotations

import pytest

from shoal.core.emulation import EmulatedMachine, parse
from shoal.worker.training.slowdown import Clocks, FixedStepCost, Slowdown, StretchedCompute, slowdown_for


class FakeMachine:
    """A machine with simulated clocks, whose work takes `contention` times its CPU time."""

    def __init__(self, contention: float = 1.0) -> None:
        self.now_s, self.spent_s, self.contention = 100.0, 7.0, contention
        self.clocks = Clocks(lambda: self.now_s, lambda: self.spent_s, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def work(self, cpu_s: float) -> None:
        self.spent_s += cpu_s
        self.now_s += cpu_s * self.contention

    def step(
        self, slowdown: Slowdown, number: int, samples: int, sample_s: float, fixed_s: float = 0.0
    ) -> tuple[float, float]:
        """Run one step, two thirds of it backward; return when its gradients start to leave and when it ends."""
        cpu_s, began_s = fixed_s + sample_s * samples, self.now_s
        slowdown.begin(number)
        self.work(cpu_s / 3)
        slowdown.before_exchange(samples, samples)
        sent_s = self.now_s
        self.work(cpu_s * 2 / 3)
        slowdown.after_backward()
        return sent_s - began_s, self.now_s - began_s


def test_quarter_speed_takes_four_times_as_long_from_the_first_step() -> None:
    machine = FakeMachine()
    slowdown = StretchedCompute(EmulatedMachine(0.25), machine.clocks)
    assert [machine.step(slowdown, k, 10, 0.3)[1] for k in range(3)] == [pytest.approx(12.0)] * 3


def test_time_grows_with_samples() -> None:
    machine = FakeMachine()
    slowdown = StretchedCompute(EmulatedMachine(0.5), machine.clocks)
    assert [machine.step(slowdown, k, n, 0.3)[1] for k, n in enumerate((10, 5, 40, 1, 0, 8))] == [
        pytest.approx(2 * 0.3 * n) for n in (10, 5, 40, 1, 0, 8)
    ]


def test_step_of_mostly_fixed_cost_is_not_stretched_too_far() -> None:
    machine = FakeMachine()
    slowdown = StretchedCompute(EmulatedMachine(0.25), machine.clocks)
    took_s = [machine.step(slowdown, k, n, 0.001, fixed_s=1.0)[1] for k, n in enumerate((1, 100, 1, 50))]
    assert took_s == [pytest.approx(4 * (1 + 0.001 * n)) for n in (1, 100, 1, 50)]


def test_sleep_comes_before_the_gradients_leave() -> None:
    machine = FakeMachine()
    slowdown = StretchedCompute(EmulatedMachine(0.25), machine.clocks)
    machine.step(slowdown, 0, 10, 0.3)
    sent_s, took_s = machine.step(slowdown, 1, 10, 0.3)
    assert sent_s >= took_s - 2.0 - 0.1 * 3 * 2.0 - 1e-9, "too much of the sleep comes after the gradients left"


def test_busy_machine_does_not_lengthen_the_sleep() -> None:
    idle, busy = FakeMachine(), FakeMachine(contention=3.0)
    for machine in (idle, busy):
        machine.step(StretchedCompute(EmulatedMachine(0.25), machine.clocks), 0, 10, 0.3)
    assert busy.now_s - idle.now_s == pytest.approx(2 * 3.0)


def test_aborted_step_does_not_affect_the_next() -> None:
    machine = FakeMachine()
    slowdown = StretchedCompute(EmulatedMachine(0.25), machine.clocks)
    slowdown.begin(0)
    machine.work(1.0)
    slowdown.before_exchange(10, 10)
    machine.work(50.0)
    assert machine.step(slowdown, 0, 10, 0.3)[1] == pytest.approx(12.0)


def test_stretch_follows_the_schedule() -> None:
    machine = FakeMachine()
    slowdown = StretchedCompute(EmulatedMachine(1.0, ((2, 0.25),)), machine.clocks)
    took_s = [machine.step(slowdown, k, 10, 0.3)[1] for k in range(4)]
    assert took_s == [pytest.approx(s) for s in (3.0, 3.0, 12.0, 12.0)]


def test_fixed_cost_is_exact_for_any_real_work() -> None:
    emulation = parse("sample_s=1,fixed_s=2,1,0.5:0.25@2")
    assert emulation is not None
    machine = FakeMachine(contention=2.0)
    slowdown = FixedStepCost(emulation, 1, machine.clocks)
    took_s = [machine.step(slowdown, k, n, 0.1 + 0.01 * k)[1] for k, n in enumerate((5, 10, 10, 0, 1))]
    assert took_s == [pytest.approx(s) for s in (12.0, 22.0, 42.0, 2.0, 6.0)]
    assert machine.step(slowdown, 5, 5, 0.1)[0] > 20.0, "most of the sleep comes after the gradients left"


def test_fixed_cost_is_exact_on_a_sometimes_busy_machine() -> None:
    emulation = parse("sample_s=1")
    assert emulation is not None
    machine = FakeMachine()
    slowdown = FixedStepCost(emulation, 0, machine.clocks)
    took_s = [machine.step(slowdown, k, 10, sample_s)[1] for k, sample_s in enumerate((0.3, 0.6, 0.3, 0.6, 0.3))]
    assert took_s[0] == pytest.approx(10.0)
    assert took_s[2:] == [pytest.approx(10.0)] * 3, "only the first slow step may exceed its cost"


def test_micro_batches_of_a_step_are_stretched_together() -> None:
    machine = FakeMachine()
    slowdown = StretchedCompute(EmulatedMachine(0.25), machine.clocks)
    for step in range(2):
        began_s = machine.now_s
        slowdown.begin(step)
        machine.work(1.0 + 2.0)
        machine.work(1.0)
        slowdown.before_exchange(20, 10)
        machine.work(2.0)
        slowdown.after_backward()
        assert machine.now_s - began_s == pytest.approx(4 * 6.0)


def test_work_that_takes_longer_than_its_cost_is_not_delayed() -> None:
    emulation = parse("sample_s=0.001")
    assert emulation is not None
    machine = FakeMachine()
    assert machine.step(FixedStepCost(emulation, 0, machine.clocks), 0, 10, 0.3) == (
        pytest.approx(1.0),
        pytest.approx(3.0),
    )


def test_member_at_full_speed_has_no_slowdown() -> None:
    assert slowdown_for("local/0", "") is None
    assert slowdown_for("local/0", "1,0.5") is None
    assert isinstance(slowdown_for("local/1", "1,0.5"), StretchedCompute)
    assert isinstance(slowdown_for("local/0", "1:0.5@9"), StretchedCompute)
    assert isinstance(slowdown_for("local/0", "sample_s=0.1,1,0.5"), FixedStepCost)
