from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.core.data.lanes import LaneLayout
from shoal.errors import SampleFailed, ShardChanged, UnusableShard
from shoal.worker.data.lane import Lane, Lengths, Shards
from shoal.worker.data.rng_state import RngState


def lane_of(shards: list[Any], lengths: Lengths | None = None) -> Lane:
    layout = LaneLayout(len(shards), size=2, lanes=1)
    return Lane(Shards(shards), layout, 0, 0, {} if lengths is None else lengths, RngState())


def test_lane_reads_its_shards_one_after_another_and_learns_their_lengths() -> None:
    lengths: Lengths = {}
    lane = lane_of([lambda: iter("abc"), lambda: iter("d")], lengths)
    assert lane.take(0, 2, keep=0) == (["a", "b"], True)
    assert lane.take(2, 2, keep=0) == (["c", "d"], False)
    assert lengths == {0: 3, 1: 1}


def test_kept_samples_are_taken_again_without_reading() -> None:
    opened: list[int] = []

    def shard() -> Iterator[str]:
        opened.append(1)
        yield from "abcdef"

    lane = lane_of([shard])
    lane.take(0, 2, keep=2)
    second = lane.take(2, 2, keep=2)
    assert lane.take(0, 2, keep=2) == (["a", "b"], True)
    assert lane.take(2, 2, keep=2) == second
    assert opened == [1]


def test_position_beyond_a_shard_of_known_length_does_not_open_it() -> None:
    def never() -> Iterator[str]:
        raise AssertionError("opened")

    assert lane_of([never, lambda: iter("xy")], {0: 5}).take(6, 1, keep=0) == (["y"], False)


def test_shard_that_changed_its_length_is_an_error() -> None:
    with pytest.raises(ShardChanged, match="shard 0 now has 2 samples"):
        lane_of([lambda: iter("ab")], {0: 3}).take(0, 4, keep=0)


def test_shard_is_opened_again_after_a_read_error() -> None:
    failures = iter([True, False])

    def flaky() -> Iterator[str]:
        fails = next(failures)
        yield "a"
        if fails:
            raise OSError("gone")
        yield "b"

    lane = lane_of([flaky])
    with pytest.raises(SampleFailed, match="sample 1 of shard 0"):
        lane.take(0, 2, keep=0)
    assert lane.take(0, 2, keep=0) == (["a", "b"], False)


def test_random_numbers_of_a_sample_do_not_depend_on_where_reading_began() -> None:
    def noisy() -> Iterator[float]:
        while True:
            yield random.random()

    class Skipping:
        """Iterable whose iterator can be entered anywhere."""

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> float:
            return random.random()

        def skip(self, count: int) -> int:
            return count

    assert lane_of([Skipping]).take(5, 2, keep=0)[0] == lane_of([noisy]).take(0, 7, keep=0)[0][5:]


@pytest.mark.parametrize(("shard", "why"), [("a path", "it is a str"), (iter("ab"), "read only once")])
def test_shard_that_cannot_be_opened_twice_is_refused(shard: Any, why: str) -> None:
    with pytest.raises(UnusableShard, match=why):
        Shards([shard])
