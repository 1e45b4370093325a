from __future__ import annotations

import math

import numpy as np
import pytest

from shoal.core.step_report import (
    CATCHING_UP,
    STOP,
    WIDTH,
    StepReport,
    agreed_world,
    decode,
    encode,
    learning_rate_mismatch,
    step_mismatch,
)


def test_report_survives_the_exchange() -> None:
    sent = (
        StepReport(2**50, 7, 7.5, -0.1, 0.2, 0.3, 0.4, 1e30, 12, STOP | CATCHING_UP, more=False),
        StepReport(2**50, samples=1, more=True),
    )
    rows = np.stack([encode(report) for report in sent])
    assert rows.shape == (2, WIDTH)
    assert rows.dtype == np.float64
    assert decode(rows) == sent


def test_loss_of_nan_is_kept() -> None:
    assert math.isnan(decode(encode(StepReport(1, loss=math.nan))[None])[0].loss)


def test_rows_of_another_width_are_rejected() -> None:
    with pytest.raises(ValueError, match="expected rows"):
        decode(np.zeros((2, WIDTH + 1)))


@pytest.mark.parametrize(
    ("prepared", "number"), [((3, 3), 3), ((3, 0), None), ((3, 4), None), ((0, 0), None), ((), None)]
)
def test_world_is_agreed_on_only_if_all_members_have_prepared_it(prepared: tuple[int, ...], number: int | None) -> None:
    assert agreed_world([StepReport(1, prepared=world) for world in prepared]) == number


def test_members_at_different_steps_are_detected() -> None:
    assert step_mismatch([StepReport(4), StepReport(4)]) == ""
    assert "rank 1 is at step 5" in step_mismatch([StepReport(4), StepReport(5)])


def test_different_learning_rates_are_reported_except_of_joiners() -> None:
    assert learning_rate_mismatch([StepReport(4, rate=0.1), StepReport(4, rate=0.1 + 1e-12), StepReport(-1)]) == ""
    assert (
        learning_rate_mismatch([StepReport(4, rate=0.1), StepReport(-1), StepReport(4, rate=0.01)])
        == "0.1 at rank 0, 0.01 at rank 2"
    )
