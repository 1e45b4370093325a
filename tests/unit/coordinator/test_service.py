"""The way from an event to its effects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.coordinator.stage import create_run, open_service

from shoal.coordinator import service as service_module
from shoal.core.membership import events as ev
from shoal.core.runs.events import ProgressMeasured, RunCreated
from shoal.core.runs.spec import RunSpec
from shoal.errors import JournalUnwritable
from shoal.store.journal import Journal, JournalEntry, read

CREATED = RunCreated(RunSpec("r", ("t.py",), "/", (1, 1)), {"tensorboard": False})


def test_replay_restores_the_runs_and_records_the_restart(tmp_path: Path) -> None:
    service = open_service(tmp_path)
    service.handle("r-1", CREATED)
    service.close()
    again = open_service(tmp_path)
    again.replay()
    assert again.state.runs["r-1"].spec == CREATED.spec
    again.close()
    kinds = [entry.kind for entry in read(tmp_path)]
    assert kinds == ["RunCreated", "CoordinatorStarted", "CoordinatorRestarted"]


def test_failing_action_does_not_block_the_next(tmp_path: Path) -> None:
    service, done = open_service(tmp_path), list[int]()
    service.attempt(lambda: 1 / 0)
    service.attempt(lambda: done.append(1))
    assert done == [1]
    service.close()


def test_actions_wait_in_order_while_the_journal_cannot_be_written(tmp_path: Path) -> None:
    service, done, full = open_service(tmp_path), list[int](), True

    def first() -> None:
        if full:
            raise JournalUnwritable("the disk is full")
        done.append(1)

    service.attempt(first)
    service.attempt(lambda: done.append(2))
    assert (done, service.retry() is not None) == ([], True)
    full = False
    assert (service.retry(), done) == (None, [1, 2])
    service.close()


def refuse(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the journal have no space for events of this kind."""
    append = Journal.append

    def append_others(self: Journal, run: str, event: Any, at: float) -> JournalEntry:
        if isinstance(event, kind):
            raise JournalUnwritable("the disk is full")
        return append(self, run, event, at)

    monkeypatch.setattr(Journal, "append", append_others)


def test_events_that_wait_for_the_journal_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_WAITING", 3)
    service, done, full = open_service(tmp_path), list[int](), True

    def first() -> None:
        if full:
            raise JournalUnwritable("the disk is full")

    service.attempt(first)
    for number in range(5):
        service.attempt(lambda number=number: done.append(number))
    full = False
    assert (service.retry(), done) == (None, [0, 1])
    service.close()


def test_measured_step_is_kept_until_the_journal_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = open_service(tmp_path)
    create_run(service)
    service.measured("r-1", ProgressMeasured(7, 0, None, 0.5, 1.0, {}))
    with monkeypatch.context() as patched:
        refuse(ev.ProgressRecorded, patched)
        with pytest.raises(JournalUnwritable):
            service.handle("r-1", ev.ScaleRequested(1, 1))
    service.handle("r-1", ev.ScaleRequested(1, 1))
    assert service.state.runs["r-1"].membership.step == 7
    service.close()


@pytest.mark.parametrize("loss", [0.5, float("inf")])
def test_run_ends_although_its_last_measurement_cannot_be_journaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: float
) -> None:
    service = open_service(tmp_path)
    create_run(service)
    service.measured("r-1", ProgressMeasured(5, 0, None, loss, 1.0, {}))
    if loss == 0.5:
        refuse(ProgressMeasured, monkeypatch)
    service.handle("r-1", ev.StopRequested("enough", False, 75))
    assert service.state.runs["r-1"].has_ended
    service.close()
    assert [entry.kind for entry in read(tmp_path)][-1] == "StopRequested"
