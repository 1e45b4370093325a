from __future__ import annotations

import pytest

from shoal.core.data.lanes import LaneLayout, advance
from shoal.core.data.sample_order import Cursor
from shoal.errors import BadSize, EmptyDataset


def test_number_of_lanes_is_as_large_as_useful() -> None:
    assert LaneLayout.of(1000, 512).lanes == 64
    assert LaneLayout.of(3, 512).quotas == (171, 171, 170)
    assert LaneLayout.of(1000, 8).lanes == 8


def test_lanes_follow_the_shares() -> None:
    layout = LaneLayout.of(64, 512)
    assert [layout.lanes_of((384, 128, 0), rank) for rank in range(3)] == [(0, 48), (48, 64), (64, 64)]


def test_shards_are_shuffled_every_epoch_and_occur_once() -> None:
    layout = LaneLayout.of(20, 4, epochs=2, seed=1, shuffle=True)
    epochs = [[shard for lane in range(4) for shard in layout.shards_of(lane, epoch)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(20))
    assert epochs[0] != epochs[1]


def test_epoch_ends_when_no_lane_has_more() -> None:
    assert advance(Cursor(0, 4), more=True) == Cursor(0, 5)
    assert advance(Cursor(0, 4), more=False) == Cursor(1, 0)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"shards": 0, "size": 4}, EmptyDataset),
        ({"shards": 2, "size": 0}, BadSize),
        ({"shards": 2, "size": 4, "lanes": 3}, BadSize),
        ({"shards": 9, "size": 4, "lanes": 5}, BadSize),
        ({"shards": 2, "size": 4, "lanes": 0}, BadSize),
        ({"shards": 2, "size": 4, "epochs": 0}, BadSize),
    ],
)
def test_invalid_layouts_are_refused(arguments: dict[str, int], error: type[Exception]) -> None:
    with pytest.raises(error):
        LaneLayout.of(**arguments)
