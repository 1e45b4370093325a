"""Joining a run: once in each process, and not again in its forks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from shoal.errors import AlreadyJoined
from shoal.worker import join


@pytest.fixture(autouse=True)
def _no_run_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "_joined_pid", 0)


def test_second_join_of_a_process_is_refused() -> None:
    join._raise_if_joined("local/0")
    with pytest.raises(AlreadyJoined, match="called twice"):
        join._raise_if_joined("local/0")


def test_join_in_a_fork_of_a_member_is_refused() -> None:
    join._raise_if_joined("local/0")
    child = os.fork()
    if child == 0:
        try:
            join._raise_if_joined("local/0")
        except AlreadyJoined as error:
            os._exit(7 if "fork" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_script_without_a_coordinator_may_join_as_often_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_URL", raising=False)
    assert join.join().run == join.join().run == "alone"


@pytest.fixture
def _sigterm_of_before() -> Iterator[None]:
    previous = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, previous)


@pytest.mark.usefixtures("_sigterm_of_before")
def test_sigterm_to_a_process_and_its_group_is_one_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[tuple[float, str]] = []
    restored, left = threading.Semaphore(0), threading.Semaphore(0)

    class Noted:
        """A session that only notes that it is to leave."""

        def leave(self, grace_s: float, reason: str) -> None:
            notices.append((grace_s, reason))
            left.release()

    monkeypatch.setattr(join, "_restore_default_sigterm", restored.release)
    join._handle_sigterm(cast(Any, Noted()), 12.0)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert left.acquire(timeout=60.0)
    assert restored.acquire(timeout=60.0), "the next one, later, ends the process"
    assert not left.acquire(timeout=0.05)
    assert notices == [(12.0, "SIGTERM")]
