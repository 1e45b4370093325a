from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan

import numpy as np
import pytest

from shoal.core.state_check import (
    MAX_COST,
    CheckSchedule,
    Kind,
    StateDigest,
    TensorDigest,
    affordable_gap,
    difference,
    digest,
    majority,
)
from shoal.core.step_report import StepReport


def reports(step: int, *checksums: int, check_s: float = 0.001, step_s: float = 0.1) -> list[StepReport]:
    return [StepReport(step, compute_s=step_s, checksum=c, checksum_s=check_s if c else 0.0) for c in checksums]


def checked_steps(schedule: CheckSchedule, world: int, steps: range, **times: float) -> list[int]:
    checked = []
    for step in steps:
        due = schedule.due(step, world)
        assert not schedule.observe(step, reports(step, *([7, 7] if due else [0, 0]), **times))
        if due:
            checked.append(step)
    return checked


def test_checks_are_dense_at_the_start_of_a_world_and_then_sparse() -> None:
    schedule = CheckSchedule()
    # One percent of a step: every other step would be affordable, but 8 is the least gap.
    assert checked_steps(schedule, 1, range(40)) == [0, 1, 3, 7, 15, 23, 31, 39]
    assert checked_steps(schedule, 2, range(40, 45)) == [40, 41, 43]


@pytest.mark.parametrize("check_s", [1e-6, 0.002, 0.3, 2.0])
def test_checks_cost_at_most_the_promised_part_of_the_training(check_s: float) -> None:
    step_s, steps = 0.1, 20_000
    checks = len(checked_steps(CheckSchedule(), 1, range(steps), check_s=check_s, step_s=step_s))
    warm_up = 11  # the gap doubles from 1 to at most 1000
    affordable = max(MAX_COST * steps * step_s / check_s, steps / 1000)
    assert checks <= affordable + warm_up


def test_step_without_a_checksum_of_some_rank_is_not_concluded_from() -> None:
    schedule = CheckSchedule()
    assert schedule.due(5, world=1)
    assert not schedule.observe(5, reports(5, 7, 0, 8))
    assert schedule.agreed is None
    assert schedule.due(6, world=1)
    assert schedule.observe(6, reports(6, 7, 7, 8))


def test_gap_is_long_while_no_step_was_timed() -> None:
    assert affordable_gap(reports(0, 1, 1, step_s=0.0)) == 1000


@pytest.mark.parametrize("size", [3, 8192, 8192 * 3 + 5])
def test_hash_notices_any_changed_or_swapped_value(size: int) -> None:
    raw = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    expected = digest(raw)
    assert digest(raw.copy()) == expected
    for index in (0, size // 2, size - 1):
        changed = raw.copy()
        changed[index] ^= 1
        assert digest(changed) != expected
    swapped = raw.copy()
    swapped[[0, -1]] = swapped[[0, -1]][::-1] + np.array([1, 255], np.uint8)
    assert digest(swapped) != expected


def state(*tensors: tuple[str, Kind, int, tuple[float, ...]]) -> StateDigest:
    return StateDigest(tuple(TensorDigest(*tensor) for tensor in tensors))


def compare(states: Sequence[StateDigest], platforms: Sequence[float]) -> tuple[str, str, int] | None:
    found = difference(states[0], np.stack([s.rows() for s in states]), platforms)
    return (found.severity, found.tensor.name, found.differing) if found is not None else None


def pair(kind: Kind, value: float, other: float) -> list[StateDigest]:
    return [
        state(("same", "parameter", 3, (1.0,)), ("w", kind, number, (5.0, v, 1.0)))
        for number, v in enumerate((value, other))
    ]


def test_any_bit_counts_on_machines_of_one_kind() -> None:
    assert compare(pair("parameter", 2.0, 2.0), [1, 1]) == ("diverged", "w", 1)
    assert compare(pair("optimizer", 2.0, 2.0 + 1e-9), [1, 1]) == ("diverged", "w", 1)


def test_rounding_of_machines_of_different_kinds_is_tolerated() -> None:
    assert compare(pair("parameter", 2.0, 2.0 + 1e-6), [1, 2]) == ("rounding", "w", 1)
    assert compare(pair("parameter", 2.0, 2.1), [1, 2]) == ("diverged", "w", 1)


@pytest.mark.parametrize("other", [nan, inf])
def test_value_that_is_no_number_on_one_rank_alone_is_no_rounding(other: float) -> None:
    assert compare(pair("parameter", 2.0, other), [1, 2]) == ("diverged", "w", 1)
    assert compare(pair("parameter", other, other), [1, 2]) == ("rounding", "w", 1)


def test_buffer_that_differs_is_no_error_of_its_own() -> None:
    assert compare(pair("buffer", 2.0, 9.0), [1, 1]) == ("buffer", "w", 1)
    worse = [state(("b", "buffer", n, ()), ("w", "parameter", n, ())) for n in range(2)]
    assert compare(worse, [1, 1]) == ("diverged", "w", 2)


def test_equal_states_have_no_difference_and_one_checksum() -> None:
    first, second = pair("parameter", 1.0, 1.0)
    assert compare([first, first], [1, 1]) is None
    assert first.checksum != second.checksum
    assert 0 < first.checksum <= 2**52


@pytest.mark.parametrize(
    ("checksums", "ranks"), [((1, 2, 2), (1, 2)), ((1, 2), (0,)), ((3, 1, 2), (0,)), ((1, 2, 1, 2), (0, 2))]
)
def test_majority_wins_and_of_equal_groups_the_one_with_the_lowest_rank(
    checksums: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    assert majority(checksums) == ranks
