from __future__ import annotations

from shoal.core.shares.measurement_window import FIRST_WINDOWS, MeasurementWindow
from shoal.core.shares.settings import parse


def is_full(window: MeasurementWindow, mode: str = "continuous", *, epoch_started: bool = False) -> bool:
    return window.is_full(parse("model", window=10, mode=mode), FIRST_WINDOWS, epoch_started=epoch_started)


def test_windows_grow_to_the_setting() -> None:
    window, sizes = MeasurementWindow(), []
    for _ in range(5):
        while not is_full(window):
            window.count(matched=True)
        sizes.append(window.matched)
        window.close()
    assert sizes == [2, 4, 8, 10, 10]


def test_window_without_matching_steps_is_full_after_four_times_as_many() -> None:
    window = MeasurementWindow()
    while not is_full(window):
        window.count(matched=False)
    assert window.waited == 4 * FIRST_WINDOWS[0]


def test_settled_window_waits_for_an_epoch_in_mode_epoch() -> None:
    window = MeasurementWindow(number=3, matched=1000)
    assert not is_full(window, "epoch")
    assert is_full(window, "epoch", epoch_started=True)
