from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.data.sample_order import SampleOrder
from shoal.core.shares.split import EqualShares, FixedShares, StaticShares, span

POLICIES = st.just(EqualShares()) | st.lists(st.floats(0, 1e9), min_size=1, max_size=6).filter(any).map(
    lambda weights: FixedShares(tuple(weights))
)


@given(POLICIES, st.integers(0, 10_000), st.integers(1, 12), st.data())
def test_shares_sum_to_the_batch_and_ranks_catching_up_get_none(
    policy: StaticShares, size: int, ranks: int, data: st.DataObject
) -> None:
    catching_up = data.draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    shares = policy.shares(size, ranks, catching_up)
    assert len(shares) == ranks
    assert sum(shares) == size
    assert all(share >= 0 for share in shares)
    assert all(shares[rank] == 0 for rank in catching_up)
    assert shares == policy.shares(size, ranks, catching_up)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(0, 5000))
def test_fixed_share_is_less_than_one_sample_off(weights: list[int], size: int) -> None:
    shares = FixedShares(tuple(weights)).shares(size, len(weights))
    assert all(abs(share - size * weight / sum(weights)) < 1 for share, weight in zip(shares, weights, strict=True))


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 9), st.booleans(), st.data())
def test_epoch_is_complete_for_any_shares(samples: int, size: int, seed: int, drop: bool, data: st.DataObject) -> None:
    size = min(size, samples)
    order = SampleOrder(samples, size, epochs=2, seed=seed, last="drop" if drop else "keep")
    ids: list[int] = []
    for step in range(order.steps_per_epoch, order.total_steps):
        ranks = data.draw(st.integers(1, 5))
        shares = data.draw(POLICIES).shares(order.size_of(step), ranks)
        for rank in range(ranks):
            ids += order.ids(step, *span(shares, rank)).tolist()
    assert len(ids) == len(set(ids))
    assert len(ids) == (samples - samples % size if drop else samples)
