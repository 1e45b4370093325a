"""Exact mode's sums have the same bits however the shards are divided among members."""

from __future__ import annotations

import copy

import pytest
import torch

from shoal.core.shares.reduction_tree import ShardRange
from shoal.errors import UnsupportedInExactMode
from shoal.testing.threaded_world import FixedWorldSession, together
from shoal.torch.gradients.tree_buckets import WEIGHT_STEP, TreeBuckets, exact_weight, fix_numerics

SHARDS = 6
MODEL = torch.nn.Linear(5, 3)
INPUTS = [torch.randn(2, 5, generator=torch.Generator().manual_seed(shard)) * 10.0**shard for shard in range(SHARDS)]


def summed(session: FixedWorldSession, cuts: tuple[int, ...]) -> list[list[float]]:
    model = copy.deepcopy(MODEL)
    buckets = TreeBuckets(list(model.parameters()), statistics=0)
    start, stop = cuts[session.rank], cuts[session.rank + 1]
    buckets.begin_step(ShardRange(SHARDS, start, stop))
    for shard in range(start, stop - 1):
        buckets.begin_shard()
        model(INPUTS[shard]).square().sum().backward()
        buckets.end_shard()
    assert session.exchange is not None
    buckets.arm(session.exchange)
    if start < stop:
        model(INPUTS[stop - 1]).square().sum().backward()
    buckets.finish(3.0, empty=start == stop)
    buckets.close()
    return [p.grad.flatten().tolist() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("cuts", [(0, 3, 6), (0, 1, 6), (0, 2, 5, 6), (0, 6, 6)])
def test_sums_do_not_depend_on_the_members(cuts: tuple[int, ...]) -> None:
    alone = together(1, lambda session: summed(session, (0, SHARDS)))[0]
    assert len(alone) == 2
    assert together(len(cuts) - 1, lambda session: summed(session, cuts)) == [alone] * (len(cuts) - 1)


def test_weights_are_rounded_to_multiples_whose_sums_are_exact() -> None:
    assert exact_weight(37.0) == 37.0
    assert exact_weight(1 / 3) % WEIGHT_STEP == 0.0
    assert sum(map(exact_weight, [0.1, 0.2, 0.3])) == sum(map(exact_weight, [0.3, 0.2, 0.1]))


def test_synchronised_batchnorm_is_refused() -> None:
    with pytest.raises(UnsupportedInExactMode, match="sync_batchnorm"):
        fix_numerics(torch.nn.Linear(1, 1), True, 1)


def test_numerics_name_what_the_bits_depend_on() -> None:
    assert fix_numerics(torch.nn.Linear(1, 1), False, torch.get_num_threads()).keys() == {"threads", "cpu", "torch"}
