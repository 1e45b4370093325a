"""Measurements of a machine check, between two ends of a socket pair."""

from __future__ import annotations

import socket
import threading

import pytest

from shoal.agent import machine_check


@pytest.fixture
def peer():
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=machine_check._serve, args=(theirs,), daemon=True)
    thread.start()
    yield ours
    ours.close()
    thread.join(10.0)


def test_pings_are_echoed_and_a_stream_is_counted(peer: socket.socket) -> None:
    assert machine_check._ping(peer) >= 0.0
    assert machine_check._ping(peer) >= 0.0
    assert machine_check._stream(peer, lasting_s=0.0) > 0.0, "also on a machine that is too busy to send in time"


def test_closed_connection_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(OSError, match=r"closed|Broken pipe"):
        machine_check._ping(ours)
