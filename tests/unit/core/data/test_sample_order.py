from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from shoal.core.data.sample_order import TABLE_LIMIT, Cursor, SampleOrder, permute
from shoal.errors import BadSize, DatasetTooSmall, EmptyDataset


def epoch_of(order: SampleOrder, epoch: int) -> list[int]:
    first = epoch * order.steps_per_epoch
    steps = range(first, first + order.steps_per_epoch)
    return [int(i) for step in steps for i in order.ids(step, 0, order.size_of(step))]


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 100, TABLE_LIMIT, TABLE_LIMIT + 1, 10_007, 65_536])
def test_epoch_has_every_sample_exactly_once(samples: int) -> None:
    order = SampleOrder(samples, size=max(1, samples // 7), epochs=2, seed=5)
    assert sorted(epoch_of(order, 1)) == list(range(samples))


def test_order_never_changes_between_versions() -> None:
    assert SampleOrder(100_000, 8, seed=1).ids(3, 0, 4).tolist() == [79836, 33346, 17563, 56365]
    assert SampleOrder(100, 8, seed=1).ids(3, 0, 4).tolist() == [44, 49, 33, 77]


def test_ids_of_a_slice_match_the_whole_batch() -> None:
    order = SampleOrder(50_000, 512, epochs=2, seed=3)
    whole = order.ids(96, 0, 512)
    assert order.ids(96, 100, 300).tolist() == whole[100:300].tolist()
    assert order.ids(96, 5, 5).size == 0


@pytest.mark.parametrize("samples", [600, 50_000])
def test_epochs_and_seeds_give_unrelated_orders(samples: int) -> None:
    everything = np.arange(samples)
    orders = [permute(everything, samples, seed, epoch) for seed in (0, 1, -1, 2**70) for epoch in (0, 1, 2)]
    for number, order in enumerate(orders):
        for other in orders[:number]:
            assert np.count_nonzero(order == other) < 15  # one is expected by chance
            assert abs(np.corrcoef(order, other)[0, 1]) < 6 / np.sqrt(samples)


@pytest.mark.parametrize("samples", [900, 40_000])
def test_order_is_well_mixed(samples: int) -> None:
    """Compare where the samples of each tenth land, over many seeds, by chi-square with 81 degrees of freedom."""
    everything = np.arange(samples)
    counts = np.zeros((10, 10))
    for seed in range(20):
        places = permute(everything, samples, seed, 0)
        np.add.at(counts, (everything * 10 // samples, places * 10 // samples), 1)
    expected = samples * 20 / 100
    assert ((counts - expected) ** 2 / expected).sum() < 150
    neighbours = np.abs(np.diff(places))
    assert abs(neighbours.mean() / (samples / 3) - 1) < 0.06  # a third of the range apart, on average


def test_small_dataset_comes_in_every_order() -> None:
    permutations = {tuple(permute(np.arange(4), 4, seed, 0).tolist()) for seed in range(400)}
    assert len(permutations) == 24


def test_billion_samples_cost_no_memory() -> None:
    order = SampleOrder(1_000_000_000, 512, seed=9)
    tracemalloc.start()
    batch = order.ids(order.total_steps - 1, 0, order.size_of(order.total_steps - 1))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 <= batch.min() <= batch.max() < 1_000_000_000
    assert peak_bytes < 1_000_000


def test_short_last_batch_is_kept_or_dropped() -> None:
    kept, dropped = SampleOrder(10, 4, epochs=3), SampleOrder(10, 4, epochs=3, last="drop")
    assert (kept.steps_per_epoch, kept.total_steps, kept.size_of(2)) == (3, 9, 2)
    assert (dropped.steps_per_epoch, dropped.total_steps, dropped.size_of(1)) == (2, 6, 4)
    assert kept.cursor(4) == Cursor(1, 1)
    assert kept.cursor(9) == Cursor(3, 0)


def test_samples_keep_their_order_without_shuffling() -> None:
    assert epoch_of(SampleOrder(10, 4, shuffle=False), 0) == list(range(10))


@pytest.mark.parametrize(("step", "start", "stop"), [(0, 0, 5), (0, 3, 2), (2, 0, 3), (3, 0, 1), (-1, 0, 1)])
def test_range_outside_a_batch_is_refused(step: int, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not within"):
        SampleOrder(10, 4).ids(step, start, stop)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"samples": 0, "size": 1}, EmptyDataset),
        ({"samples": 3, "size": 4}, DatasetTooSmall),
        ({"samples": 3, "size": 4, "last": "drop"}, DatasetTooSmall),
        ({"samples": 3, "size": 0}, BadSize),
        ({"samples": 3, "size": 1, "epochs": 0}, BadSize),
        ({"samples": 3, "size": 1, "last": "half"}, BadSize),
    ],
)
def test_impossible_sizes_are_refused_with_a_remedy(arguments: dict[str, int], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        SampleOrder(**arguments)  # type: ignore[arg-type]
    assert caught.value.do  # type: ignore[attr-defined]


def test_change_in_mid_epoch_continues_from_the_sample_reached() -> None:
    order = SampleOrder(10, 2, epochs=2, shuffle=False).change_size(2, 5)
    assert [order.ids(step, 0, order.size_of(step)).tolist() for step in range(order.total_steps)] == [
        [0, 1],
        [2, 3],
        [4, 5, 6, 7, 8],
        [9],
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]
    assert order.cursor(3) == Cursor(0, 3)


def test_change_after_the_end_has_no_effect_but_is_kept() -> None:
    order = SampleOrder(10, 5).change_size(7, 2)
    assert order.total_steps == 2
    assert order.size_changes == ((7, 2),)


def test_later_change_at_the_same_step_replaces_the_earlier() -> None:
    order = SampleOrder(100, 5).change_size(4, 10)
    assert order.change_size(4, 20).size_changes == ((4, 20),)
    assert order.change_size(4, 5).size_changes == ()
    assert order.change_size(9, 10) == order


@pytest.mark.parametrize("step", [-1, 0, 3])
def test_change_before_a_known_change_is_refused(step: int) -> None:
    order = SampleOrder(100, 5).change_size(4, 10) if step >= 0 else SampleOrder(100, 5)
    with pytest.raises(ValueError, match="not after"):
        order.change_size(step, 20)


@pytest.mark.parametrize(("size", "error"), [(0, BadSize), (101, DatasetTooSmall)])
def test_change_to_an_impossible_size_is_refused(size: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        SampleOrder(100, 5).change_size(4, size)


def test_lookup_among_many_changes_is_fast() -> None:
    order = SampleOrder(1_000_000_000, 512, size_changes=tuple((1000 * n, 512 + n) for n in range(1, 300)))
    tracemalloc.start()
    place = order.position(order.total_steps - 1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert place.first + place.size == 1_000_000_000
    assert peak_bytes < 200_000


@pytest.mark.parametrize("size_changes", [((4, 10), (4, 20)), ((4, 10), (2, 20)), ((-1, 10),)])
def test_changes_out_of_order_are_refused(size_changes: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="in increasing order"):
        SampleOrder(100, 5, size_changes=size_changes)


@pytest.mark.parametrize("last", ["keep", "drop"])
@pytest.mark.parametrize(("samples", "size"), [(10, 3), (9, 3), (5, 5), (7, 6)])
def test_whole_batches_within_a_number_of_samples_are_counted(samples: int, size: int, last: str) -> None:
    order = SampleOrder(samples, size, epochs=3, last=last)  # type: ignore[arg-type]
    ends = np.cumsum([order.size_of(step) for step in range(order.total_steps)])
    for count in range(int(ends[-1]) + 3):
        assert order.steps_within(count) == int((ends <= count).sum())
