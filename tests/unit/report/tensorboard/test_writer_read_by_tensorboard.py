"""Event files as TensorBoard's own reader sees them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.unit.report.tensorboard.test_rows import line, member, view

from shoal.report.tensorboard.writer import EventFiles, folder_of

pytest.importorskip("tensorboard")


@pytest.fixture
def accumulator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return TensorBoard's reader without TensorFlow, as in most installations, even if TensorFlow is installed."""
    import tensorboard.compat

    notf = ModuleType("tensorboard.compat.notf")
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", notf)
    monkeypatch.setattr(tensorboard.compat, "notf", notf, raising=False)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator


def test_tensorboard_reads_scalars_and_texts(accumulator: Any, tmp_path: Path) -> None:
    for coordinator in range(2):
        reports = EventFiles(pytest.fail)
        reports.record_line(
            str(tmp_path), line("world 1 started at step 0 with m/0, m/1", None, "FormWorld"), 3 * coordinator
        )
        for step in range(3 * coordinator, 3 * coordinator + 3):
            seated = (member("m/0", 51, step + 1), member("m/1", 13, step + 1))
            reported = {"loss": 1.0 / (step + 1), "metrics": {"accuracy": 0.25 * step}}
            reports.record_view(view(members=seated, directory=str(tmp_path), **reported), 0.1, now=100.0 + step)
        reports.close()
    events = accumulator(folder_of(str(tmp_path))).Reload()
    loss = [(event.wall_time, event.step, event.value) for event in events.Scalars("training/loss")]
    assert loss == [(100.0 + step, step + 1, pytest.approx(1.0 / (step + 1))) for step in range(6)]
    assert [event.value for event in events.Scalars("metrics/accuracy")] == [0.25 * step for step in range(6)]
    assert [event.value for event in events.Scalars("shares/m/1")] == [13.0] * 6
    texts = [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors("worlds")]
    assert texts == [(step, "world 1 started at step 0 with m/0, m/1") for step in (0, 4)]
    assert events.SummaryMetadata("worlds").plugin_data.plugin_name == "text"
