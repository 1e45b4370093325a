"""A stream yields every sample exactly once while the world changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.data.lanes import LaneLayout, advance
from shoal.core.data.sample_order import Cursor
from shoal.torch.data.fetch import lane_reader
from shoal.worker.data.stream_reader import LaneReader

Sample = tuple[int, int]


def shard(number: int, length: int) -> Callable[[], Iterator[Sample]]:
    return lambda: ((number, index) for index in range(length))


def shard_with_skip(number: int, length: int) -> Callable[[], Any]:
    class Skipping:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Sample:
            if self.at >= length:
                raise StopIteration
            self.at += 1
            return number, self.at - 1

        def skip(self, count: int) -> int:
            passed = min(count, length - self.at)
            self.at += passed
            return passed

    return Skipping


def shards_of(lengths: list[int], kinds: list[int]) -> list[Any]:
    make = [shard, shard_with_skip, lambda number, length: [(number, index) for index in range(length)]]
    return [make[kind](number, length) for number, (length, kind) in enumerate(zip(lengths, kinds, strict=True))]


def one_member_run(shards: list[Any], layout: LaneLayout) -> list[tuple[Cursor, list[Sample]]]:
    reader = lane_reader(shards, layout, collate=list)
    cursor = Cursor(0, 0)
    steps = []
    while cursor.epoch < layout.epochs:
        batch, samples, more = reader.take(cursor.index, cursor.epoch, (0, layout.lanes))
        assert samples == len(batch or [])
        steps.append((cursor, batch or []))
        cursor = advance(cursor, more)
    return steps


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[Any], list[int], LaneLayout]:
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    kinds = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    size = draw(st.integers(1, 12))
    lanes = draw(st.none() | st.integers(1, min(len(lengths), size)))
    shuffle = draw(st.booleans())
    layout = LaneLayout.of(len(lengths), size, lanes, epochs=2, seed=draw(st.integers(0, 3)), shuffle=shuffle)
    return shards_of(lengths, kinds), lengths, layout


@given(streams())
@settings(max_examples=80)
def test_each_epoch_has_every_sample_exactly_once(stream: tuple[list[Any], list[int], LaneLayout]) -> None:
    shards, lengths, layout = stream
    steps = one_member_run(shards, layout)
    every = Counter((number, index) for number, length in enumerate(lengths) for index in range(length))
    for epoch in range(layout.epochs):
        assert Counter(sample for at, batch in steps if at.epoch == epoch for sample in batch) == every
    assert all(len(batch) <= layout.size for _, batch in steps)
    assert all(batch for _, batch in steps) or not every


@given(streams(), st.data())
@settings(max_examples=80)
def test_world_changes_and_resumes_change_no_step(
    stream: tuple[list[Any], list[int], LaneLayout], data: st.DataObject
) -> None:
    shards, _, layout = stream
    expected = dict(one_member_run(shards, layout))
    cursor = Cursor(0, 0)
    members: list[LaneReader] = []
    while cursor.epoch < layout.epochs:
        members = changed(members, shards, layout, data)
        shares = data.draw(st.lists(st.integers(0, 5), min_size=len(members), max_size=len(members)).filter(any))
        order = data.draw(st.permutations(members))
        parts = [
            reader.take(cursor.index, cursor.epoch, layout.lanes_of(shares, rank)) for rank, reader in enumerate(order)
        ]
        union = [sample for batch, _, _ in parts for sample in batch or []]
        assert union == expected[cursor]
        assert sum(samples for _, samples, _ in parts) == len(union)
        if data.draw(st.integers(0, 3)):
            cursor = advance(cursor, any(more for _, _, more in parts))
        elif not data.draw(st.integers(0, 3)):
            cursor = data.draw(st.sampled_from(sorted(expected, key=lambda at: (at.epoch, at.index))))
    assert cursor == Cursor(layout.epochs, 0)


def changed(members: list[LaneReader], shards: list[Any], layout: LaneLayout, data: st.DataObject) -> list[LaneReader]:
    """Remove some members and add others, with or without the lengths that the rest know."""
    kept = [reader for reader in members if data.draw(st.integers(0, 4))]
    joined = [lane_reader(shards, layout, collate=list) for _ in range(data.draw(st.integers(0 if kept else 1, 1)))]
    for reader in joined:
        if kept and data.draw(st.booleans()):
            reader.load_state_dict(kept[0].state_dict())
    return kept + joined
