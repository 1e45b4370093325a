"""The record of one step."""

from __future__ import annotations

from shoal.core.shares.reduction_tree import ShardRange
from shoal.core.world import Address, Seat, World
from shoal.worker.collectives.ring import Ring
from shoal.worker.data.feed import MicroBatch
from shoal.worker.training.step import Step

WORLD = World(1, (Seat("m/0", "1", Address("127.0.0.1", 9)),), 0)


def step_of(*samples: int, first: bool = False, shard_range: ShardRange | None = None) -> Step:
    micro_batches = [MicroBatch(None, count) for count in samples]
    return Step(
        3, 0, micro_batches, 64, Ring(0, ["m/0"]), WORLD, units=sum(samples), first=first, shard_range=shard_range
    )


def test_share_is_the_sum_of_the_micro_batches() -> None:
    assert step_of(8, 8, 3).samples == 19
    assert step_of(0).empty


def test_last_micro_batch_is_known_by_its_index() -> None:
    step = step_of(8, 8)
    assert not step.on_last_micro_batch
    step.index = 1
    assert step.on_last_micro_batch


def test_first_step_and_a_step_without_exchange_measure_nothing() -> None:
    first, usual = step_of(8, first=True), step_of(8)
    assert usual.measured_units == 0
    first.reduced = usual.reduced = True
    assert (first.measured_units, usual.measured_units) == (0, 8)


def test_shard_of_a_micro_batch_counts_from_the_start_of_the_range() -> None:
    step = step_of(8, 8, shard_range=ShardRange(8, 4, 6))
    step.index = 1
    assert step.shard == 5
    assert step_of(8).shard is None
