"""The end of a training that is evaluated is in a checkpoint, once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.settings import RunSettings
from shoal.store import checkpoint
from shoal.store.blob_store import open_store
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.training.training_state import StateCodec, TrainingState


class Busy:
    """A writer that is still at the checkpoint before."""

    busy = True

    def close(self, wait_s: float) -> bool:
        return wait_s > 0


def keeper_at(path: Path, step: int, *, evaluator: bool = True) -> TrainingState:
    session = StandaloneSession()
    session.settings = RunSettings(evaluator=evaluator, checkpoint_every_steps=1)
    session.step = step
    codec = StateCodec(lambda _parts: (b"", [np.zeros(8, np.uint8)]), lambda _parts, _header, _buffers: None)
    return TrainingState(session, "r", str(path), codec)


def written(path: Path) -> list[int]:
    return [entry.step for entry in checkpoint.entries(open_store(str(path)))]


def test_an_end_whose_checkpoint_was_skipped_is_written_after_all(tmp_path: Path) -> None:
    keeper = keeper_at(tmp_path, 5)
    keeper._writer = Busy()  # type: ignore[assignment]
    keeper.at_boundary(5)
    assert written(tmp_path) == []
    keeper.at_end(5)
    assert written(tmp_path) == [5]


def test_an_end_that_is_written_already_is_not_written_again(tmp_path: Path) -> None:
    keeper = keeper_at(tmp_path, 5)
    keeper.at_boundary(5)
    keeper.at_end(5)
    assert written(tmp_path) == [5]


def test_an_end_that_was_restored_is_there(tmp_path: Path) -> None:
    keeper_at(tmp_path, 5).checkpoint_now()
    again = keeper_at(tmp_path, 5)
    assert again.restore() == 5
    again.at_end(5)
    assert written(tmp_path) == [5]


def test_without_an_evaluator_nothing_is_written_at_the_end(tmp_path: Path) -> None:
    keeper_at(tmp_path, 5, evaluator=False).at_end(5)
    assert written(tmp_path) == []
