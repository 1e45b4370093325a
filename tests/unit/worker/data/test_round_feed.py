from __future__ import annotations

from shoal.core.data.rounds import RoundOrder
from shoal.core.shares.balancer import ShareBalancer, parse
from shoal.core.world import Address, Seat, World
from shoal.worker.data.fetch import Fetcher
from shoal.worker.data.rng_state import RngState
from shoal.worker.data.round_feed import BatchLoader, RoundFeed


class Noted:
    """Samples 0…n that record which of them were read."""

    def __init__(self, samples: int) -> None:
        self.samples, self.read = samples, list[int]()

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def world(members: int) -> World:
    seats = tuple(Seat(f"local/{rank}", "", Address("127.0.0.1", 0)) for rank in range(members))
    return World(1, seats, 0)


def feed_of(data: Noted) -> RoundFeed:
    order = RoundOrder.of(data.samples, 4, length=3, seed=1)
    return RoundFeed(order, BatchLoader(order, Fetcher(data, order, list, RngState())), ShareBalancer())


def test_local_batch_is_read_when_it_is_due() -> None:
    data = Noted(24)
    micro_batches = feed_of(data).micro_batches(0, world(2), 0, ())
    assert data.read == []
    first = micro_batches[0].take()
    assert data.read == first
    assert len(first) == 2  # the global batch of 4, over 2 members


def test_rounds_of_all_members_hold_each_sample_once() -> None:
    taken: list[int] = []
    for step in range(2):
        for rank in range(2):
            feed = feed_of(Noted(24))
            micro_batches = feed.micro_batches(step, world(2), rank, ())
            assert [batch.samples for batch in feed.local_batches] == [2, 2, 2]
            taken += [sample for micro_batch in micro_batches for sample in micro_batch.take()]
    assert sorted(taken) == list(range(24))


def test_global_batches_pass_in_proportion_to_local_ones() -> None:
    feed = feed_of(Noted(24))
    feed.micro_batches(0, world(2), 0, ())
    assert [feed.global_batches_due(0, batches) for batches in (0, 1, 2, 3)] == [0, 1, 2, 3]


def test_member_without_a_share_gets_a_placeholder() -> None:
    feed = feed_of(Noted(24))
    (micro_batch,) = feed.micro_batches(0, world(2), 1, (1,))
    assert micro_batch.samples == 0
    assert len(micro_batch.take()) == 2


def test_local_batch_is_cut_for_a_declared_maximum_only() -> None:
    feed = feed_of(Noted(24))
    feed.balancer.set_micro_batch("local/0", 1)
    assert [m.samples for m in feed.micro_batches(0, world(2), 0, ())] == [2, 2, 2]
    feed.balancer.settings = parse("equal", max=1000, machines="local/0 max=1")
    assert [m.samples for m in feed.micro_batches(1, world(1), 0, ())] == [1] * 12
