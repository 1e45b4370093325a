from __future__ import annotations

from shoal.core import emulation
from shoal.core.data.lanes import LaneLayout
from shoal.core.data.sample_order import SampleOrder
from shoal.core.shares.balancer import ShareBalancer, parse
from shoal.core.step_report import StepReport
from shoal.core.world import Address, Seat, World
from shoal.worker.data.feed import IndexedFeed, StreamFeed
from shoal.worker.data.fetch import Fetcher
from shoal.worker.data.lane import Shards
from shoal.worker.data.rng_state import RngState
from shoal.worker.data.share_loader import ShareLoader
from shoal.worker.data.stream_reader import LaneReader, LaneSource


def world(members: int, number: int = 1) -> World:
    seats = tuple(Seat(f"local/{rank}", "", Address("127.0.0.1", 0)) for rank in range(members))
    return World(number, seats, 0)


def indexed(samples: int, size: int, micro: int | None = None) -> IndexedFeed:
    order = SampleOrder(samples, size, seed=3)
    loader = ShareLoader(order, Fetcher(range(samples), order, list, RngState()), micro_batch_size=micro)
    return IndexedFeed(order, loader, ShareBalancer())


def stream(shards: list[list[str]], size: int) -> StreamFeed:
    layout = LaneLayout.of(len(shards), size)
    source = LaneSource(Shards(shards), layout, list, RngState(), kept_steps=2)
    return StreamFeed(layout, LaneReader(source), ShareBalancer())


def test_members_of_any_world_read_each_sample_of_an_epoch_once() -> None:
    seen: list[int] = []
    for step, members in enumerate((1, 3, 2)):
        for rank in range(members):
            micro_batches = indexed(20, 8, micro=2).micro_batches(step, world(members), rank, ())
            assert all(len(m.take()) == m.samples <= 2 for m in micro_batches)
            seen += [sample for m in micro_batches for sample in m.take()]
    assert sorted(seen) == list(range(20))


def test_rank_that_catches_up_gets_a_placeholder_and_the_others_its_share() -> None:
    feeds = [indexed(20, 8), indexed(20, 8)]
    shares = [feed.micro_batches(0, world(2), rank, (1,)) for rank, feed in enumerate(feeds)]
    assert [[m.samples for m in share] for share in shares] == [[8], [0]]
    assert shares[1][0].take()  # something to run the model on, with weight 0


def test_share_above_its_maximum_is_computed_in_micro_batches() -> None:
    feed = indexed(40, 20)
    feed.balancer.settings = parse("equal", max=8, machines="local/1 max=4")
    shares = [feed.micro_batches(0, world(2), rank, ()) for rank in range(2)]
    assert [[m.samples for m in share] for share in shares] == [[7, 6], [4, 3]]


def test_first_split_follows_emulated_machines() -> None:
    feed = indexed(40, 20)
    feed.balancer.settings = parse("model", emulation=emulation.parse("1,0.25"))
    shares = [feed.micro_batches(0, world(2), rank, ()) for rank in range(2)]
    assert [[m.samples for m in share] for share in shares] == [[16], [4]]


def test_halved_micro_batch_stays_above_one_sample() -> None:
    feed = indexed(20, 8)
    assert feed.halve_micro_batch(5)
    assert feed.micro_batch_size == 2
    assert not feed.halve_micro_batch(1)


def test_stream_ends_its_epoch_when_no_member_has_more() -> None:
    feeds = [stream([["a", "b", "c"], ["d"]], 2) for _ in range(2)]
    steps = 0
    seen: list[str] = []
    while not feeds[0].ended(steps):
        parts = [feed.micro_batches(steps, world(2), rank, ()) for rank, feed in enumerate(feeds)]
        seen += [sample for part in parts for m in part if m.samples for sample in m.take()]
        reports = [StepReport(steps, more=feed.has_more()) for feed in feeds]
        for feed in feeds:
            feed.on_commit(steps, world(2), reports)
        steps += 1
    assert (steps, sorted(seen)) == (3, ["a", "b", "c", "d"])


def test_stream_continues_from_the_cursor_of_another_member() -> None:
    first, second = (stream([["a", "b", "c", "d"]], 1) for _ in range(2))
    first.micro_batches(0, world(1), 0, ())
    first.on_commit(0, world(1), [StepReport(0)])
    second.load_state_dict(first.state_dict())
    assert second.micro_batches(1, world(1), 0, ())[0].take() == ["b"]
