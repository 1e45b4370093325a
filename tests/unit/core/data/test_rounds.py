"""Rounds of local training: the samples of each, and the local batches of a share."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.data.rounds import RoundOrder, local_batches
from shoal.core.data.sample_order import SampleOrder
from shoal.core.sync_mode import parse
from shoal.errors import BadSettings, BadSync, DatasetTooSmall
from shoal.settings import parse_settings


def in_order(order: SampleOrder) -> list[int]:
    total = order.total_steps
    return [i for step in range(total) for i in order.ids(step, 0, order.size_of(step)).tolist()]


@given(
    samples=st.integers(1, 300),
    size=st.integers(1, 300),
    length=st.integers(1, 20),
    last=st.sampled_from(["keep", "drop"]),
    seed=st.integers(0, 5),
)
def test_rounds_have_the_samples_of_steps_in_order(samples: int, size: int, length: int, last: str, seed: int) -> None:
    size = min(size, samples)
    steps = SampleOrder(samples, size, 2, seed, last)  # type: ignore[arg-type]
    rounds = RoundOrder.of(samples, size, length, 2, seed, last)  # type: ignore[arg-type]
    assert in_order(rounds) == in_order(steps)
    assert sum(rounds.batches_in(step) for step in range(rounds.total_steps)) == steps.total_steps
    assert all(rounds.batches_in(step) <= length for step in range(rounds.total_steps))


@given(
    samples=st.integers(1, 120),
    size=st.integers(1, 40),
    length=st.integers(1, 9),
    every=st.integers(1, 50),
    last=st.sampled_from(["keep", "drop"]),
)
def test_rounds_end_after_every_given_number_of_batches(
    samples: int, size: int, length: int, every: int, last: str
) -> None:
    size = min(size, samples)
    steps = SampleOrder(samples, size, 3, 1, last)  # type: ignore[arg-type]
    rounds = RoundOrder.of(samples, size, length, 3, 1, last, every=every)  # type: ignore[arg-type]
    assert in_order(rounds) == in_order(steps)
    batches = [rounds.batches_in(step) for step in range(rounds.total_steps)]
    assert sum(batches) == steps.total_steps
    assert max(batches) <= length
    assert [sum(batches[:end]) for end in rounds.ends] == list(range(every, steps.total_steps + 1, every))
    # No more of them than there have to be.
    edges = sorted({*range(0, steps.total_steps, every), *range(0, steps.total_steps + 1, steps.steps_per_epoch)})
    assert len(batches) == sum(-(-(b - a) // length) for a, b in pairwise(edges))


def test_round_ends_with_its_epoch() -> None:
    rounds = RoundOrder.of(100, 10, 4, epochs=2)
    assert [rounds.size_of(step) for step in range(rounds.total_steps)] == [40, 40, 20] * 2
    assert RoundOrder.of(100, 10, 10**6, epochs=3).total_steps == 3


def test_global_batch_larger_than_the_dataset_is_refused() -> None:
    with pytest.raises(DatasetTooSmall):
        RoundOrder.of(10, 11, 2)


@given(share=st.integers(0, 5000), batch=st.integers(1, 600), members=st.integers(1, 9))
def test_share_is_divided_into_nearly_equal_batches(share: int, batch: int, members: int) -> None:
    sizes = local_batches(share, batch, members)
    assert sum(sizes) == share
    assert all(sizes)
    if share:
        assert max(sizes) - min(sizes) <= 1
        usual = batch / members
        assert max(sizes) <= max(1, -(-3 * usual // 2))
        if share >= 3 * usual >= 3:
            assert min(sizes) >= usual * 2 // 3


def test_nearly_equal_shares_of_one_batch_are_one_local_batch() -> None:
    assert [local_batches(share, 64, 3) for share in (22, 21, 21)] == [(22,), (21,), (21,)]


@pytest.mark.parametrize(("text", "length"), [("step", 0), ("local:1", 1), ("local:500", 500)])
def test_length_of_a_round_is_parsed_from_the_setting(text: str, length: int) -> None:
    found = parse(text)
    assert (found.local, found.served) == (length, False)


@pytest.mark.parametrize("text", ["", "local", "local:", "local:0", "local:-1", "local:1.5", "local:x", "Local:2"])
def test_unknown_sync_mode_is_refused_with_the_valid_ones(text: str) -> None:
    with pytest.raises(BadSync, match="unknown sync mode") as refused:
        parse_settings({"sync": text})
    assert "local:H" in str(refused.value)


@pytest.mark.parametrize("values", [{"outer.lr": 0}, {"outer.momentum": 1}, {"outer.momentum": -0.1}])
def test_invalid_outer_settings_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(BadSettings, match="outer"):
        parse_settings(values)
