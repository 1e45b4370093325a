"""A checkpoint is written beside the training, and every failure is reported."""

from __future__ import annotations

import errno
import threading

import numpy as np
import pytest

from shoal.store import checkpoint
from shoal.store.blob_store import LocalStore
from shoal.store.checkpoint_writer import CheckpointWriter
from shoal.worker.transport.snapshot import Snapshot


def snapshot(step: int) -> Snapshot:
    return Snapshot(step, b"header", [np.full(1077, step, np.uint8)], readers=1)


def steps(store) -> list[int]:
    return [entry.step for entry in checkpoint.entries(store)]


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "checkpoints")


class Refusing(LocalStore):
    def put(self, name, chunks):
        raise OSError(errno.ENOSPC, "no")


class Slow(LocalStore):
    """Waits, in the middle of a data blob, until it is told to go on."""

    def __init__(self, root) -> None:
        super().__init__(root)
        self.started, self.go_on = threading.Event(), threading.Event()

    def put(self, name, chunks):
        self.started.set()
        assert self.go_on.wait(20)
        return super().put(name, chunks)


class Reports:
    def __init__(self) -> None:
        self.done, self.errors, self.skipped = [], [], []

    def writer(self, store, keep: int = 2) -> CheckpointWriter:
        return CheckpointWriter(
            store,
            "r",
            keep,
            on_done=lambda *report: self.done.append(report),
            on_error=self.errors.append,
            on_skip=lambda *report: self.skipped.append(report),
        )


def test_a_writer_writes_in_the_background_and_reports(store):
    reports = Reports()
    writer = reports.writer(store)
    for step in (1, 2, 3):
        assert writer.submit(snapshot(step), world=1, meta={})
        writer._thread.join(20)
    assert writer.close(20)
    assert [(step, size) for step, _, size, _ in reports.done] == [(1, 1077), (2, 1077), (3, 1077)]
    assert "step-000000000003" in reports.done[-1][1]
    assert reports.errors == []
    assert steps(store) == [3, 2]


def test_a_checkpoint_due_while_one_is_in_flight_is_skipped_and_said_so(tmp_path):
    reports, store = Reports(), Slow(tmp_path)
    writer = reports.writer(store)
    assert writer.submit(snapshot(1), world=1, meta={})
    assert store.started.wait(20)
    skipped = snapshot(2)
    assert not writer.submit(skipped, world=1, meta={})
    assert skipped.finished
    assert reports.skipped == [(2, 1)]
    store.go_on.set()
    assert writer.close(20)
    assert steps(store) == [1]


def test_the_owner_may_change_its_memory_while_a_slow_writer_writes(tmp_path):
    reports, store = Reports(), Slow(tmp_path)
    live = [np.full(1000, 1, np.uint8)]
    source = Snapshot(1, b"", live, readers=1)
    writer = reports.writer(store)
    writer.submit(source, world=1, meta={})
    assert store.started.wait(20)
    assert source.freeze() == 1000
    live[0][:] = 2
    store.go_on.set()
    assert writer.close(20)
    assert set(checkpoint.read(store).buffers[0]) == {1}


def test_a_failing_writer_reports_and_tries_the_next_one(tmp_path):
    reports = Reports()
    writer = reports.writer(Refusing(tmp_path))
    for step in (1, 2):
        assert writer.submit(snapshot(step), world=1, meta={})
        writer._thread.join(20)
    assert [error.code for error in reports.errors] == ["S503", "S503"]


def test_even_a_bug_in_a_store_does_not_end_in_silence(tmp_path):
    class Buggy(LocalStore):
        def put(self, name, chunks):
            raise ZeroDivisionError("oops")

    reports = Reports()
    writer = reports.writer(Buggy(tmp_path))
    writer.submit(snapshot(1), world=1, meta={})
    writer.close(20)
    assert "ZeroDivisionError: oops" in reports.errors[0].why


def test_closing_gives_up_what_takes_too_long(tmp_path):
    reports, store = Reports(), Slow(tmp_path)
    writer = reports.writer(store)
    writer.submit(snapshot(1), world=1, meta={})
    assert store.started.wait(20)
    assert not writer.close(0)
    store.go_on.set()
    writer._thread.join(20)
    assert [error.code for error in reports.errors] == ["S503"]
    assert checkpoint.newest(store) is None
    assert not writer.submit(snapshot(2), world=1, meta={})


def test_closing_an_idle_writer_is_immediate(store):
    assert Reports().writer(store).close(0)


def test_writer_whose_fence_falls_reports_that_nothing_was_written(store):
    reports = Reports()
    writer = reports.writer(store)
    assert writer.submit(snapshot(1), world=1, meta={}, fence=lambda: False)
    assert writer.close(20)
    assert (reports.done, len(reports.errors), steps(store)) == ([], 1, [])


def test_time_of_a_checkpoint_is_measured_with_the_given_clock(store):
    ticks = iter((10.0, 12.5))
    done = []
    writer = CheckpointWriter(
        store, "r", 1, on_done=lambda *report: done.append(report), on_error=done.append, now=lambda: next(ticks)
    )
    writer.submit(snapshot(3), world=1, meta={})
    assert writer.close(20)
    assert [(step, seconds) for step, _, _, seconds in done] == [(3, 2.5)]
