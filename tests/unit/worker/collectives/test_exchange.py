from __future__ import annotations

import numpy as np
import pytest

from shoal.core.shares.reduction_tree import ShardRange
from shoal.worker.collectives.exchange import TreePartials

SUM = np.zeros(4, np.float32)


def test_partials_must_have_one_node_of_the_sums_shape_for_each_tree_node() -> None:
    held = ShardRange(4, 0, 3)  # two shards make one node, the third is a node by itself
    TreePartials(held, [np.ones(4, np.float32)] * 2).check(SUM)
    with pytest.raises(ValueError, match="2 nodes, but 1 were given"):
        TreePartials(held, [np.ones(4, np.float32)]).check(SUM)
    for node in (np.ones(3, np.float32), np.ones(4), np.ones((4, 2), np.float32)[:, 0]):
        with pytest.raises(ValueError, match="contiguous"):
            TreePartials(held, [np.ones(4, np.float32), node]).check(SUM)
    TreePartials().check(SUM)
