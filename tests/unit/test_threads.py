"""Reading ahead in threads: what comes out is what would be read when asked, whatever was foreseen."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from shoal.errors import BadSize
from shoal.worker.data.fetch import ReadKey, Watch
from shoal.worker.data.read_ahead_threads import Threads, depth

WAIT_S = 20.0


class Numbers:
    """Gives the key back, and notes who asked for it."""

    noun = "sample"

    def __init__(self) -> None:
        self.read_by: dict[ReadKey, list[threading.Thread]] = {}
        self.asked = threading.Semaphore(0)

    def read(self, key: ReadKey, watch: Watch) -> Any | None:
        self.read_by.setdefault(key, []).append(threading.current_thread())
        self.asked.release()
        return ("read", key) if watch(key.start) else None


class Held(Numbers):
    """Does not answer before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.given_up: list[ReadKey] = []

    def read(self, key: ReadKey, watch: Watch) -> Any | None:
        if threading.current_thread() is threading.main_thread():
            return super().read(key, watch)
        self.asked.release()
        self.free.wait(WAIT_S)
        if not watch(key.start):
            self.given_up.append(key)
            self.asked.release()
            return None
        return super().read(key, watch)


def span(step: int, share: int) -> ReadKey:
    return ReadKey(step, 0, share, None)


def test_steps_are_read_before_they_are_asked_for() -> None:
    source = Numbers()
    ahead = Threads(source, workers=1, prefetch=2)
    assert ahead.get(span(0, 4), lambda step: span(step, 4)) == ("read", span(0, 4))
    for _ in range(3):
        assert source.asked.acquire(timeout=WAIT_S)
    assert source.read_by.keys() == {span(0, 4), span(1, 4), span(2, 4)}
    here = threading.current_thread()
    assert ahead.get(span(1, 4), lambda step: span(step, 4)) == ("read", span(1, 4))
    assert here not in source.read_by[span(1, 4)]
    assert len(source.read_by[span(1, 4)]) == 1, "read twice"
    ahead.close()


def test_a_share_that_changes_is_read_anew() -> None:
    source = Numbers()
    ahead = Threads(source, workers=2, prefetch=2)
    share = 4
    for step in range(40):
        if step % 7 == 3:
            share += 1
        # The foresight of the step before was of another share: nothing of it may come out.
        assert ahead.get(span(step, share), lambda later, share=share: span(later, share)) == (
            "read",
            span(step, share),
        )
    ahead.close()


def test_who_asks_reads_what_nobody_has_begun_to_read() -> None:
    source = Held()
    ahead = Threads(source, workers=1, prefetch=3)
    ahead.look_ahead(0, lambda step: span(step, 4))
    assert source.asked.acquire(timeout=WAIT_S), "nobody reads ahead"
    # The only thread is held up by step 1; step 2 is foreseen, but not begun.
    assert ahead.get(span(2, 4), lambda step: span(step, 4)) == ("read", span(2, 4))
    source.free.set()
    ahead.close()


def test_what_nobody_wants_any_more_is_given_up() -> None:
    source = Held()
    ahead = Threads(source, workers=1, prefetch=1)
    ahead.look_ahead(0, lambda step: span(step, 4))
    assert source.asked.acquire(timeout=WAIT_S)
    ahead.look_ahead(0, lambda step: span(step, 5))
    source.free.set()
    assert source.asked.acquire(timeout=WAIT_S)
    assert source.given_up == [span(1, 4)]
    assert ahead.get(span(1, 5), lambda _: None) == ("read", span(1, 5))
    ahead.close()


def test_closing_waits_for_nobody() -> None:
    source = Held()
    ahead = Threads(source, workers=1, prefetch=1)
    ahead.look_ahead(0, lambda step: span(step, 4))
    assert source.asked.acquire(timeout=WAIT_S)
    ahead.close()
    assert not source.free.is_set()
    source.free.set()
    assert source.asked.acquire(timeout=WAIT_S)
    assert source.given_up == [span(1, 4)]


def test_an_error_arises_where_the_batch_is_asked_for() -> None:
    class Broken(Numbers):
        def read(self, key: ReadKey, watch: Watch) -> Any | None:
            super().read(key, watch)
            raise ValueError(f"step {key.step}") if key.step else KeyError

    source = Broken()
    ahead = Threads(source, workers=1, prefetch=1)
    ahead.look_ahead(0, lambda step: span(step, 4))
    assert source.asked.acquire(timeout=WAIT_S)
    with pytest.raises(ValueError, match="step 1"):
        ahead.get(span(1, 4), lambda _: None)
    ahead.close()


def test_how_far_ahead_must_make_sense() -> None:
    assert depth(0, 2) == 0
    assert depth(2, 3) == 6
    with pytest.raises(BadSize, match="workers=-1"):
        depth(-1, 2)
    with pytest.raises(BadSize, match="prefetch=0"):
        depth(1, 0)
