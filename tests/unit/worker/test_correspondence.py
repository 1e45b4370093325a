"""What a member does at once with what the coordinator tells it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.wire import member_messages as messages
from shoal.worker.session.coordinator_client import CoordinatorClient


@pytest.fixture
def member() -> Any:
    session: Any = object.__new__(CoordinatorClient)
    session.said = []
    session._link = SimpleNamespace(heartbeat_s=0.5, send=session.said.append)
    session._changed = threading.Condition()
    session._leaving = None
    return session


def test_it_beats_as_seldom_as_the_coordinator_of_a_large_run_asks(member: Any) -> None:
    member._on_welcome(messages.WelcomeMsg(heartbeat_s=0.75, lease_s=3.0, coordinator="c", started=False))
    assert member._link.heartbeat_s == 0.75


def test_a_later_notice_counts_if_it_leaves_less_time(member: Any) -> None:
    member.leave(60.0, "Slurm has sent its signal")
    member.leave(8.0, "another job takes its place")
    member.leave(30.0, "its engine ends it")
    assert [(round(one.within_s), one.cause) for one in member.said] == [
        (60, "Slurm has sent its signal"),
        (8, "another job takes its place"),
    ]
    assert member._leaving[1] == "another job takes its place"
