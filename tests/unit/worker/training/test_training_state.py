"""Checkpoints of a `TrainingState`: the final state of an evaluated training is written exactly once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.settings import RunSettings
from shoal.store import checkpoint
from shoal.store.blob_store import open_store
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.training.training_state import StateCodec, TrainingState


class BusyWriter:
    """A writer that has not finished the checkpoint before."""

    busy = True

    def close(self, wait_s: float) -> bool:
        return wait_s > 0


def state_at(path: Path, step: int, *, evaluator: bool = True) -> TrainingState:
    session = StandaloneSession()
    session.settings = RunSettings(evaluator=evaluator, checkpoint_every_steps=1)
    session.step = step
    codec = StateCodec(lambda _parts: (b"", [np.zeros(8, np.uint8)]), lambda _parts, _header, _buffers: None)
    return TrainingState(session, "r", str(path), codec)


def written_steps(path: Path) -> list[int]:
    return [entry.step for entry in checkpoint.entries(open_store(str(path)))]


def test_final_state_is_written_if_its_checkpoint_was_skipped(tmp_path: Path) -> None:
    state = state_at(tmp_path, 5)
    state._writer = BusyWriter()  # type: ignore[assignment]
    state.at_boundary(5)
    assert written_steps(tmp_path) == []
    state.at_end(5)
    assert written_steps(tmp_path) == [5]


def test_final_state_is_not_written_twice(tmp_path: Path) -> None:
    state = state_at(tmp_path, 5)
    state.at_boundary(5)
    state.at_end(5)
    assert written_steps(tmp_path) == [5]


def test_restored_final_state_is_not_written_again(tmp_path: Path) -> None:
    state_at(tmp_path, 5).checkpoint_now()
    state = state_at(tmp_path, 5)
    assert state.restore() == 5
    state.at_end(5)
    assert written_steps(tmp_path) == [5]


def test_final_state_is_not_written_without_an_evaluator(tmp_path: Path) -> None:
    state_at(tmp_path, 5, evaluator=False).at_end(5)
    assert written_steps(tmp_path) == []


def test_callbacks_run_after_each_load(tmp_path: Path) -> None:
    state, calls = state_at(tmp_path, 1), []
    state.after_load.append(lambda: calls.append(1))
    state.load(b"", [])
    state.load(b"", [])
    assert len(calls) == 2
