from __future__ import annotations

import numpy as np
import pytest
from tests.unit.worker.collectives.loopback import rings, vectors, wait_all

from shoal.worker.collectives.ring import SMALL_BYTES, Ring
from shoal.worker.transport.exchange_broken import ExchangeBroken


@pytest.mark.parametrize("count", [1, 1000, SMALL_BYTES // 4 + 1, 300_001])
@pytest.mark.parametrize("size", [2, 3])
def test_sum_is_right_and_bitwise_equal_on_all_ranks(size: int, count: int) -> None:
    own = vectors(size, count)
    expected = np.sum(own, axis=0, dtype=np.float64)
    with rings(size) as world:
        wait_all([ring.reduce(vector) for ring, vector in zip(world, own, strict=True)])
    np.testing.assert_allclose(own[0], expected, rtol=1e-4, atol=1e-4)
    assert len({vector.tobytes() for vector in own}) == 1


def test_gather_returns_the_record_of_every_rank_in_rank_order() -> None:
    with rings(3) as world:
        works = [ring.gather(np.array([ring.rank, 10.0 * ring.rank])) for ring in world]
        for work in works:
            assert work.result().tolist() == [[0, 0], [1, 10], [2, 20]]


def test_world_of_one_needs_no_connection() -> None:
    ring, vector = Ring(0, ["m0"]), np.ones(3)
    ring.reduce(vector).wait()
    assert vector.tolist() == [1, 1, 1]
    ring.abort("stop")
    with pytest.raises(ExchangeBroken, match="stop"):
        ring.barrier()


def test_ranks_that_disagree_on_the_operation_say_so() -> None:
    with rings(2) as world:
        works = [world[0].reduce(np.ones(4)), world[1].gather(np.ones(4))]
        with pytest.raises(ExchangeBroken, match=r"disagree: it begins operation 1, a (sum|gather)"):
            wait_all(works)


def test_aborted_rank_breaks_every_operation_and_is_not_suspected() -> None:
    with rings(3) as world:
        pending = [ring.gather(np.ones(1)) for ring in world[1:]]
        world[0].abort("its script left the training loop")
        for work in pending:
            with pytest.raises(ExchangeBroken) as broken:
                work.wait()
            assert "m0" not in broken.value.suspects
        with pytest.raises(ExchangeBroken, match="left the training loop"):
            world[0].gather(np.ones(1)).wait()


@pytest.mark.parametrize("buffer", [np.ones((4, 4))[:, ::2], np.broadcast_to(np.ones(1), 4)])
def test_buffer_that_cannot_be_summed_in_place_is_refused(buffer: np.ndarray) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        Ring(0, ["m0"]).reduce(buffer)
