"""Reading ahead in threads gives the same data as reading on demand, whatever was predicted."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from shoal.errors import BadSize
from shoal.worker.data.fetch import ReadKey, Watch
from shoal.worker.data.read_ahead_threads import ReadAheadThreads, depth

WAIT_S = 20.0


class EchoReader:
    """Returns the key, and records which thread read it."""

    noun = "sample"

    def __init__(self) -> None:
        self.read_by: dict[ReadKey, list[threading.Thread]] = {}
        self.started = threading.Semaphore(0)

    def read(self, key: ReadKey, watch: Watch) -> Any | None:
        self.read_by.setdefault(key, []).append(threading.current_thread())
        self.started.release()
        return ("read", key) if watch(key.start) else None


class BlockedReader(EchoReader):
    """Blocks every thread but the main one until `free` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.dropped: list[ReadKey] = []

    def read(self, key: ReadKey, watch: Watch) -> Any | None:
        if threading.current_thread() is threading.main_thread():
            return super().read(key, watch)
        self.started.release()
        self.free.wait(WAIT_S)
        if not watch(key.start):
            self.dropped.append(key)
            self.started.release()
            return None
        return super().read(key, watch)


def span(step: int, share: int) -> ReadKey:
    return ReadKey(step, 0, share, None)


def test_steps_are_read_before_they_are_requested() -> None:
    source = EchoReader()
    ahead = ReadAheadThreads(source, workers=1, prefetch=2)
    assert ahead.get(span(0, 4), lambda step: span(step, 4)) == ("read", span(0, 4))
    for _ in range(3):
        assert source.started.acquire(timeout=WAIT_S)
    assert source.read_by.keys() == {span(0, 4), span(1, 4), span(2, 4)}
    own_thread = threading.current_thread()
    assert ahead.get(span(1, 4), lambda step: span(step, 4)) == ("read", span(1, 4))
    assert own_thread not in source.read_by[span(1, 4)]
    assert len(source.read_by[span(1, 4)]) == 1, "read twice"
    ahead.close()


def test_changed_share_is_read_again() -> None:
    source = EchoReader()
    ahead = ReadAheadThreads(source, workers=2, prefetch=2)
    share = 4
    for step in range(40):
        if step % 7 == 3:
            share += 1
        # The step before predicted another share: nothing of that may come out.
        assert ahead.get(span(step, share), lambda later, share=share: span(later, share)) == (
            "read",
            span(step, share),
        )
    ahead.close()


def test_caller_reads_what_no_thread_has_begun() -> None:
    source = BlockedReader()
    ahead = ReadAheadThreads(source, workers=1, prefetch=3)
    ahead.look_ahead(0, lambda step: span(step, 4))
    assert source.started.acquire(timeout=WAIT_S), "no thread reads ahead"
    # The only thread is blocked by step 1; step 2 is predicted, but not begun.
    assert ahead.get(span(2, 4), lambda step: span(step, 4)) == ("read", span(2, 4))
    source.free.set()
    ahead.close()


def test_read_that_is_no_longer_predicted_is_dropped() -> None:
    source = BlockedReader()
    ahead = ReadAheadThreads(source, workers=1, prefetch=1)
    ahead.look_ahead(0, lambda step: span(step, 4))
    assert source.started.acquire(timeout=WAIT_S)
    ahead.look_ahead(0, lambda step: span(step, 5))
    source.free.set()
    assert source.started.acquire(timeout=WAIT_S)
    assert source.dropped == [span(1, 4)]
    assert ahead.get(span(1, 5), lambda _: None) == ("read", span(1, 5))
    ahead.close()


def test_close_does_not_wait_for_a_blocked_read() -> None:
    source = BlockedReader()
    ahead = ReadAheadThreads(source, workers=1, prefetch=1)
    ahead.look_ahead(0, lambda step: span(step, 4))
    assert source.started.acquire(timeout=WAIT_S)
    ahead.close()
    assert not source.free.is_set()
    source.free.set()
    assert source.started.acquire(timeout=WAIT_S)
    assert source.dropped == [span(1, 4)]


def test_error_is_raised_where_the_batch_is_requested() -> None:
    class Broken(EchoReader):
        def read(self, key: ReadKey, watch: Watch) -> Any | None:
            super().read(key, watch)
            raise ValueError(f"step {key.step}") if key.step else KeyError

    source = Broken()
    ahead = ReadAheadThreads(source, workers=1, prefetch=1)
    ahead.look_ahead(0, lambda step: span(step, 4))
    assert source.started.acquire(timeout=WAIT_S)
    with pytest.raises(ValueError, match="step 1"):
        ahead.get(span(1, 4), lambda _: None)
    ahead.close()


def test_invalid_workers_and_prefetch_are_refused() -> None:
    assert depth(0, 2) == 0
    assert depth(2, 3) == 6
    with pytest.raises(BadSize, match="workers=-1"):
        depth(-1, 2)
    with pytest.raises(BadSize, match="prefetch=0"):
        depth(1, 0)
