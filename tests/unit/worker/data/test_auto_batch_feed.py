from __future__ import annotations

from shoal.core.batch.auto_batch import AutoBatch
from shoal.core.batch.gradient_noise import GradientNoise
from shoal.core.data.sample_order import SampleOrder
from shoal.core.shares.balancer import ShareBalancer
from shoal.core.step_report import StepReport
from shoal.core.world import Address, Seat, World
from shoal.worker.data.auto_batch_feed import AutoFeed
from shoal.worker.data.feed import Adjustment
from shoal.worker.data.fetch import Fetcher
from shoal.worker.data.rng_state import RngState
from shoal.worker.data.share_loader import ShareLoader

ALONE = World(1, (Seat("local/0", "", Address("127.0.0.1", 0)),), 0)


def feed_of(samples: int = 400) -> AutoFeed:
    order = SampleOrder(samples, 8)
    loader = ShareLoader(order, Fetcher(range(samples), order, list, RngState()))
    noise = GradientNoise()
    for _ in range(50):
        noise.observe([4.0, 4.0], [50.0, 50.0], 26.0)  # far more noise than signal: a larger batch pays
    return AutoFeed(order, loader, ShareBalancer(), AutoBatch(8, (8, 64), every=1, confirmations=1), noise)


def train(feed: AutoFeed, steps: range) -> list[Adjustment]:
    adjustments: list[Adjustment] = []
    for step in steps:
        reports = [StepReport(step, samples=feed.global_batch_size(step), measured=8, compute_s=0.1, wait_s=0.05)]
        adjustments += feed.on_commit(step, ALONE, reports)
    return adjustments


def test_changed_size_holds_for_later_steps_and_loses_no_sample() -> None:
    feed = feed_of()
    change = next(adjustment for adjustment in train(feed, range(12)) if adjustment.what == "batch")
    sizes = [feed.global_batch_size(step) for step in range(feed.total or 0)]
    assert sizes[change.step - 1] == 8
    assert sizes[change.step] == change.values["batch"] > 8
    assert sum(sizes) == 400


def test_joiner_continues_with_the_sizes_of_the_run() -> None:
    feed, joiner = feed_of(), feed_of()
    train(feed, range(12))
    joiner.load_state_dict(feed.state_dict())
    assert joiner.total == feed.total
    assert joiner.order == feed.order
    assert joiner.state_dict() == feed.state_dict()


def test_lone_member_gets_two_micro_batches_now_and_then_to_measure_noise() -> None:
    feed = feed_of()
    counts = [[m.samples for m in feed.micro_batches(step, ALONE, 0, ())] for step in range(3)]
    assert counts == [[4, 4], [8], [4, 4]]
    assert feed.micro_batch_size is None
