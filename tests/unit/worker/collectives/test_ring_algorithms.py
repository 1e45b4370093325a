from __future__ import annotations

import numpy as np
import pytest
from tests.unit.worker.collectives.loopback import rings, vectors, wait_all

from shoal.worker.collectives.ring_algorithms import SEGMENT_BYTES
from shoal.worker.collectives.ring_links import EAGER_BYTES


@pytest.mark.parametrize("count", [EAGER_BYTES // 8 + 1, SEGMENT_BYTES // 4 + 3])
def test_each_chunk_is_one_chain_of_sums_that_starts_at_its_own_rank(count: int) -> None:
    size = 3
    own = vectors(size, count)
    bounds = [count * i // size for i in range(size + 1)]
    expected = np.empty(count, np.float32)
    for chunk in range(size):
        part = slice(bounds[chunk], bounds[chunk + 1])
        total = own[chunk][part].copy()
        for hop in range(1, size):
            total = own[(chunk + hop) % size][part] + total
        expected[part] = total
    with rings(size) as world:
        wait_all([ring.reduce(vector) for ring, vector in zip(world, own, strict=True)])
    for vector in own:
        np.testing.assert_array_equal(vector, expected)


def test_gather_larger_than_the_eager_window_arrives() -> None:
    count = EAGER_BYTES // 8 * 2
    with rings(3) as world:
        works = [ring.gather(np.full(count, float(ring.rank))) for ring in world]
        for work in works:
            assert work.result()[:, -1].tolist() == [0.0, 1.0, 2.0]


def test_vector_shorter_than_the_world_is_summed_with_an_own_adder() -> None:
    calls: list[int] = []

    def add(target: np.ndarray, source: np.ndarray) -> None:
        calls.append(len(source))
        np.add(target, source, target)

    own = [np.array([rank + 1], np.int64) for rank in range(3)]
    with rings(3) as world:
        wait_all([ring.reduce(vector, add) for ring, vector in zip(world, own, strict=True)])
    assert [vector.tolist() for vector in own] == [[6]] * 3
    assert calls
