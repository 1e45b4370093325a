"""The way from an event to its effects."""

from __future__ import annotations

from pathlib import Path

from tests.unit.coordinator.stage import open_service

from shoal.core.runs.events import RunCreated
from shoal.core.runs.spec import RunSpec
from shoal.errors import JournalUnwritable
from shoal.store.journal import read

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
