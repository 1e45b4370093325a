from __future__ import annotations

import pytest

from shoal.store.checkpoint_schedule import CheckpointSchedule


@pytest.mark.parametrize(
    ("schedule", "step", "now", "due"),
    [
        (CheckpointSchedule(), 1000, 1e9, False),
        (CheckpointSchedule(every_s=300), 11, 399.9, False),
        (CheckpointSchedule(every_s=300), 11, 400.0, True),
        (CheckpointSchedule(every_s=300), 10, 1000.0, False),
        (CheckpointSchedule(every_steps=5), 14, 1e9, False),
        (CheckpointSchedule(every_steps=5), 15, 100.0, True),
        (CheckpointSchedule(every_s=300, every_steps=5), 11, 500.0, True),
    ],
)
def test_checkpoint_is_due_by_time_or_by_steps(schedule: CheckpointSchedule, step: int, now: float, due: bool) -> None:
    assert schedule.due(step, now, last_step=10, last_time=100.0) is due


def test_step_that_has_a_checkpoint_is_never_due_again() -> None:
    schedule = CheckpointSchedule(every_s=1.0, every_steps=1)
    assert not schedule.due(10, 1e9, last_step=10, last_time=0.0)
    assert not schedule.due(9, 1e9, last_step=10, last_time=0.0), "the state went back"
