"""In exact mode members read whole shards."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.utils.data import TensorDataset

from shoal.core.data.sample_order import SampleOrder
from shoal.errors import UnsupportedInExactMode
from shoal.torch.data.fetch import loader_parts
from shoal.torch.data.shard_feed import ShardLoader

ORDER = SampleOrder(samples=20, size=8, epochs=1)
DATA = TensorDataset(torch.arange(20))


def loader(shards: int, micro: int | None = None) -> ShardLoader:
    return ShardLoader(shards, *loader_parts(DATA, ORDER, micro=micro))


def test_batch_is_cut_into_shards_of_almost_equal_size() -> None:
    bounds = loader(3).bounds(0)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, 8, 4)
    assert {stop - start for start, stop in pairwise(bounds)} == {2, 3}


def test_sizes_of_a_span_are_those_of_its_shards() -> None:
    bounds = loader(4).bounds(0)
    assert loader(4).sizes_of(0, (bounds[1], bounds[3])) == (2, 2)


@pytest.mark.parametrize("shards", [0, 9])
def test_number_of_shards_must_fit_the_batch(shards: int) -> None:
    with pytest.raises(UnsupportedInExactMode, match=f"invalid exact={shards}") as raised:
        loader(shards)
    assert "pass 1 to 8 shards" in raised.value.do


def test_micro_batches_are_refused() -> None:
    with pytest.raises(UnsupportedInExactMode, match="exclude each other"):
        loader(4, micro=2)
