from __future__ import annotations

import pytest

from shoal.worker.collectives.catch_up import is_nearly_done


@pytest.mark.parametrize(
    ("elapsed_s", "own_step_s", "step_s", "follows"),
    [
        (0.19, 0.20, 0.20, True),  # a moment behind the others, as it would be for ever
        (0.30, 0.20, 0.20, True),  # overdue: any moment now
        (0.10, 0.20, 0.20, False),  # half a step behind
        (0.01, 9.00, 0.20, False),  # its first step compiled the model
    ],
)
def test_the_others_wait_for_a_newcomer_only_if_it_is_nearly_done(
    elapsed_s: float, own_step_s: float, step_s: float, follows: bool
) -> None:
    assert is_nearly_done(elapsed_s, own_step_s, step_s) is follows
