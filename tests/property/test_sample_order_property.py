from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.data.sample_order import SampleOrder


@st.composite
def changed_orders(draw: st.DrawFn) -> SampleOrder:
    samples = draw(st.integers(1, 200))
    sizes = st.integers(1, samples)
    order = SampleOrder(
        samples,
        draw(sizes),
        epochs=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 9)),
        last=draw(st.sampled_from(["keep", "drop"])),
        shuffle=draw(st.booleans()),
    )
    step = 0
    for _ in range(draw(st.integers(0, 6))):
        step += draw(st.integers(0, 12))
        order = order.change_size(step, draw(sizes))
    return order


def batches(order: SampleOrder) -> list[list[int]]:
    return [order.ids(step, 0, order.size_of(step)).tolist() for step in range(order.total_steps)]


@given(changed_orders())
def test_every_sample_comes_once_per_epoch_despite_size_changes(order: SampleOrder) -> None:
    seen: dict[int, list[int]] = {}
    for step, batch in enumerate(batches(order)):
        seen.setdefault(order.cursor(step).epoch, []).extend(batch)
    for epoch, ids in seen.items():
        whole = order.ids_at(epoch, 0, order.samples).tolist()
        assert ids == whole[: len(ids)]
        dropped = order.samples - len(ids)
        assert (
            dropped == 0 if order.last == "keep" else dropped < max(order.size, *(s for _, s in order.size_changes), 1)
        )
    if order.last == "keep":
        assert sorted(seen) == list(range(order.epochs))


@given(changed_orders())
def test_every_batch_has_the_nominal_size_unless_its_epoch_ends(order: SampleOrder) -> None:
    decided = dict(order.size_changes)
    size = order.size
    for step in range(order.total_steps):
        size = decided.get(step, size)
        place = order.position(step)
        assert order.nominal_size(step) == size
        assert place.size == order.size_of(step) == len(order.ids(step, 0, place.size)) <= size
        if place.size < size:
            assert order.last == "keep"
            assert place.first + place.size == order.samples


@given(changed_orders())
def test_cursor_advances_by_one_batch_or_to_the_next_epoch(order: SampleOrder) -> None:
    cursors = [order.cursor(step) for step in range(order.total_steps + 1)]
    assert (cursors[0].epoch, cursors[0].index) == (0, 0) or order.total_steps == 0 or order.last == "drop"
    assert (cursors[-1].epoch, cursors[-1].index) == (order.epochs, 0)
    for before, after in pairwise(cursors):
        same_epoch = after.epoch == before.epoch and after.index == before.index + 1
        assert same_epoch or (after.epoch > before.epoch and after.index == 0)


@given(changed_orders(), st.integers(0, 40), st.data())
def test_change_does_not_affect_earlier_steps(order: SampleOrder, further: int, data: st.DataObject) -> None:
    step = max([0, *(step for step, _ in order.size_changes)]) + further
    after = order.change_size(step, data.draw(st.integers(1, order.samples)))
    assert batches(after)[:step] == batches(order)[:step]


@given(changed_orders())
def test_order_without_changes_is_divided_at_multiples_of_its_size(order: SampleOrder) -> None:
    fixed = SampleOrder(order.samples, order.size, order.epochs, order.seed, order.last, order.shuffle)
    for step in range(fixed.total_steps):
        epoch, index = divmod(step, fixed.steps_per_epoch)
        whole = fixed.ids_at(epoch, 0, fixed.samples).tolist()
        assert fixed.ids(step, 0, fixed.size_of(step)).tolist() == whole[index * fixed.size :][: fixed.size]
        assert fixed.cursor(step).epoch == epoch
        assert fixed.position(step).index == index


@given(changed_orders())
def test_size_changes_survive_json(order: SampleOrder) -> None:
    loaded = json.loads(json.dumps(order.size_changes))
    again = SampleOrder(order.samples, order.size, order.epochs, order.seed, order.last, order.shuffle, loaded)
    assert again == order
    assert batches(again) == batches(order)
