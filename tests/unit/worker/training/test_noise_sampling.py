"""Which steps are measured for the gradient noise, and what the reports carry of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from shoal.core.step_report import StepReport
from shoal.core.world import Address, Seat, World
from shoal.worker.collectives.ring import Ring
from shoal.worker.data.feed import MicroBatch
from shoal.worker.training.noise_sampling import NoiseSampler, is_halfway
from shoal.worker.training.step import Step

SEATS = tuple(Seat(f"m/{rank}", "1", Address("127.0.0.1", 9)) for rank in range(2))
ALONE, PAIR = World(1, SEATS[:1], 0), World(2, SEATS, 0)


@dataclass
class Norms:
    total: float = 4.0

    def weighted(self, weight: float, global_batch_size: float) -> tuple[float, int]:
        return weight * 9.0 / global_batch_size, 1


def step_of(number: int, world: World = PAIR, micro_batches: int = 1) -> Step:
    return Step(number, 0, [MicroBatch(None, 8)] * micro_batches, 16, Ring(0, ["m/0"]), world, weight=8.0)


@pytest.mark.parametrize(
    ("step", "due"),
    [
        (step_of(10), True),
        (step_of(11), False),
        (step_of(10, ALONE), False),
        (step_of(10, ALONE, micro_batches=2), True),
        (replace(step_of(10), first=True), False),
    ],
)
def test_step_is_measured_if_its_number_is_due_and_there_are_groups_to_compare(step: Step, due: bool) -> None:
    assert NoiseSampler(10).due(step) == due
    assert not NoiseSampler(0).due(step)


def test_norms_travel_with_the_next_step_of_the_same_members() -> None:
    measured = replace(step_of(10), gradient_norms=Norms(), committed=True)
    fields = NoiseSampler(10).report_fields(measured, step_of(11))
    assert fields == {"grad_sq": 4.5, "grad_weight": 8.0, "groups": 1, "total_sq": 4.0}
    assert NoiseSampler(10).report_fields(measured, step_of(11, ALONE)) == {}
    assert NoiseSampler(10).report_fields(replace(measured, committed=False), step_of(11)) == {}


def test_only_reports_with_norms_are_observed() -> None:
    sampler = NoiseSampler(10)
    sampler.observe([StepReport(11, samples=8, weight=8.0)] * 2)
    assert sampler.noise.observations == 0
    report = StepReport(11, samples=8, weight=8.0, grad_sq=80.0, grad_weight=8.0, groups=1, total_sq=8.0)
    sampler.observe([report, report])
    # Two groups of 8 samples: (160 - 16 * 8) / (2 - 1) for one sample, and 8 - 32 / 16 of the squared norm is signal.
    assert (sampler.noise.observations, sampler.noise.variance, sampler.noise.signal) == pytest.approx((1, 32.0, 6.0))


def test_half_of_the_whole_batch_is_a_group_of_its_own() -> None:
    step = step_of(10, ALONE, micro_batches=2)
    step.backwards = 1
    assert is_halfway(step)
    assert not is_halfway(replace(step, global_batch_size=32))
