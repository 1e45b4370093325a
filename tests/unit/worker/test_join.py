"""Joining a run: once in each process, and not again in its forks."""

from __future__ import annotations

import os

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
