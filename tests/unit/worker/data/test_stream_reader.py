from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from shoal.core.data.lanes import LaneLayout
from shoal.errors import EmptyDataset, SampleFailed, ShardChanged, UnusableShard
from shoal.torch.data.fetch import lane_reader
from shoal.worker.data.stream_reader import LaneReader


class Opened:
    """Shards that record what was opened and read."""

    def __init__(self, *lengths: int) -> None:
        self.log: list[str] = []
        self.shards = [self._shard(number, length) for number, length in enumerate(lengths)]
        self.layout = LaneLayout.of(len(lengths), size=2, lanes=1)

    def _shard(self, number: int, length: int) -> Callable[[], Iterator[str]]:
        def read() -> Iterator[str]:
            self.log.append(f"open {number}")
            for index in range(length):
                yield f"{number}.{index}"
            self.log.append(f"end {number}")

        return read

    def reader(self) -> LaneReader:
        return lane_reader(self.shards, self.layout, collate=list)


def test_last_step_reports_that_there_is_no_more() -> None:
    reader = Opened(3, 0, 1).reader()
    assert reader.take(0, 0, (0, 1)) == (["0.0", "0.1"], 2, True)
    assert reader.take(1, 0, (0, 1)) == (["0.2", "2.0"], 2, False)
    assert reader.take(2, 0, (0, 1)) == (None, 0, False)


def test_repeated_step_needs_no_reading() -> None:
    data = Opened(9)
    reader = data.reader()
    first = [reader.take(step, 0, (0, 1)) for step in (0, 1)]
    assert [reader.take(step, 0, (0, 1)) for step in (1, 0)] == [first[1], first[0]]
    assert data.log == ["open 0"]


def test_shards_of_known_length_are_not_opened() -> None:
    data = Opened(3, 4, 5)
    veteran = data.reader()
    for step in range(4):
        veteran.take(step, 0, (0, 1))
    data.log.clear()
    resumed = data.reader()
    resumed.load_state_dict(veteran.state_dict())
    assert resumed.take(4, 0, (0, 1)) == (["2.1", "2.2"], 2, True)
    assert data.log == ["open 2"]


def test_reader_that_fell_behind_skips_known_shards() -> None:
    data = Opened(3, 4, 5)
    reader = data.reader()
    reader.take(0, 0, (0, 1))
    reader.load_state_dict({"shards": [0, 1], "lengths": [3, 4]})
    data.log.clear()
    assert reader.take(4, 0, (0, 1)).batch == ["2.1", "2.2"]
    assert data.log == ["open 2"]


def test_sequences_are_entered_without_reading() -> None:
    class Watched(list[int]):
        read: ClassVar[list[int]] = []

        def __getitem__(self, index: Any) -> Any:
            self.read.append(index)
            return super().__getitem__(index)

        def __iter__(self) -> Iterator[int]:
            raise AssertionError("read from the start")

    shard = Watched(range(100))
    reader = lane_reader([shard], LaneLayout.of(1, 2), collate=list)
    assert reader.take(30, 0, (0, 1)).batch == [60, 61]
    assert min(shard.read) >= 58


def test_memory_is_bounded_while_skipping() -> None:
    alive: set[int] = set()
    most = 0

    class Sample:
        def __init__(self) -> None:
            nonlocal most
            alive.add(id(self))
            most = max(most, len(alive))

        def __del__(self) -> None:
            alive.discard(id(self))

    reader = lane_reader([lambda: (Sample() for _ in range(10_000))], LaneLayout.of(1, 4), collate=list)
    assert reader.take(2000, 0, (0, 1)).samples == 4
    assert most <= 4 * 2 + 2


def test_random_numbers_of_a_shard_do_not_depend_on_its_reader() -> None:
    def shard() -> Iterator[float]:
        while True:
            yield random.random()

    layout = LaneLayout.of(2, 4)
    before = random.getstate()
    straight = lane_reader([shard, shard], layout, collate=list)
    whole = [straight.take(step, 0, (0, 2)).batch for step in range(3)]
    assert lane_reader([shard, shard], layout, collate=list).take(2, 0, (1, 2)).batch == whole[2][2:]
    assert len({number for batch in whole for number in batch}) == 12
    assert random.getstate() == before


def test_placeholder_has_samples_even_before_the_first_read() -> None:
    data = Opened(0, 3)
    seen, unseen = data.reader(), data.reader()
    seen.take(1, 0, (0, 1))
    assert seen.placeholder_batch() == ["1.2"]
    assert unseen.placeholder_batch() == ["1.0", "1.1"]
    with pytest.raises(EmptyDataset):
        Opened(0, 0).reader().placeholder_batch()


def test_paths_are_opened_by_the_given_function(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_text(f"{path.name}1\n{path.name}2\n")
    reader = lane_reader([str(path) for path in paths], LaneLayout.of(2, 2), collate=list, open=open)
    assert reader.take(1, 0, (0, 2)) == (["a2\n", "b2\n"], 2, False)
    with pytest.raises(UnusableShard, match="open="):
        lane_reader([str(path) for path in paths], LaneLayout.of(2, 2))


def test_iterator_that_can_be_read_only_once_is_refused() -> None:
    with pytest.raises(UnusableShard, match="only once"):
        lane_reader([iter([1])], LaneLayout.of(1, 1))


def test_error_in_a_shard_names_the_sample() -> None:
    def shard() -> Iterator[int]:
        yield 1
        raise OSError("disk gone")

    with pytest.raises(SampleFailed, match="sample 1 of shard 0 cannot be read: OSError: disk gone"):
        lane_reader([shard], LaneLayout.of(1, 2)).take(0, 0, (0, 1))


def test_retried_shard_loses_no_sample() -> None:
    trouble = ["network down"]

    def shard() -> Iterator[int]:
        for index in range(5):
            if index == 3 and trouble:
                raise OSError(trouble.pop())
            yield index

    reader = lane_reader([shard], LaneLayout.of(1, 2), collate=list)
    reader.take(0, 0, (0, 1))
    with pytest.raises(SampleFailed, match="network down"):
        reader.take(1, 0, (0, 1))
    assert reader.take(1, 0, (0, 1)) == ([2, 3], 2, True)
    assert reader.take(2, 0, (0, 1)) == ([4], 1, False)


def test_retried_sequence_continues_at_the_same_place() -> None:
    class Flaky(list[int]):
        trouble: ClassVar[list[str]] = ["network down"]

        def __getitem__(self, index: Any) -> Any:
            if self.trouble:
                raise OSError(self.trouble.pop())
            return super().__getitem__(index)

    reader = lane_reader([Flaky(range(9))], LaneLayout.of(1, 2), collate=list)
    with pytest.raises(SampleFailed, match="network down"):
        reader.take(2, 0, (0, 1))
    assert reader.take(2, 0, (0, 1)).batch == [4, 5]


@pytest.mark.parametrize("known", [2, 4])
def test_changed_length_of_a_shard_is_detected(known: int) -> None:
    reader = Opened(3).reader()
    reader.load_state_dict({"shards": [0], "lengths": [known]})
    with pytest.raises(ShardChanged, match=f"it had {known}"):
        [reader.take(step, 0, (0, 1)) for step in range(2)]
