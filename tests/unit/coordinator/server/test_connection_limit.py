"""Connections without a token are bounded in number and time, also when no descriptor is left."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from shoal.coordinator.server.connection_limit import PENDING_S, RESERVED_FILES, ConnectionLimit, LimitedListener


class Clock:
    """Time that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def listener(clock: Clock) -> Iterator[LimitedListener]:
    limit = ConnectionLimit(RESERVED_FILES + 16, clock)
    listener = LimitedListener.take_over(socket.create_server(("127.0.0.1", 0), backlog=64), limit)
    yield listener
    listener.close()


def connect(listener: LimitedListener) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a new connection."""
    near = socket.create_connection(listener.getsockname(), 30)
    listener.setblocking(True)
    far, _ = listener.accept()
    return near, far


def is_closed(near: socket.socket) -> bool:
    near.settimeout(30)
    return near.recv(1) == b""


def test_connection_without_a_token_is_closed_in_time(listener: LimitedListener, clock: Clock) -> None:
    (silent, far), (known, other) = connect(listener), connect(listener)
    listener.limit.admit(known.getsockname())
    clock.now = PENDING_S + 1
    listener.limit.close_late(0.0)
    assert is_closed(silent)
    known.send(b"x")
    assert other.recv(1) == b"x"
    for end in (silent, far, known, other):
        end.close()


def test_one_more_pending_connection_closes_the_oldest(listener: LimitedListener) -> None:
    pairs = [connect(listener) for _ in range(listener.limit.max_pending + 1)]
    assert listener.limit.pending == listener.limit.max_pending == 4
    assert is_closed(pairs[0][0])
    pairs[1][0].send(b"x")
    assert pairs[1][1].recv(1) == b"x"
    for near, far in pairs:
        near.close()
        far.close()
    assert listener.limit.pending == 0


def test_descriptors_are_left_for_files(listener: LimitedListener) -> None:
    pairs = [connect(listener) for _ in range(4)]
    for near, _ in pairs:
        listener.limit.admit(near.getsockname())
    listener.limit.max_open = 4
    refused = socket.create_connection(listener.getsockname(), 30)
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.accept()
    assert is_closed(refused)
    pairs.pop()[1].close()
    assert listener.limit.may_open()
    refused.close()
    for near, far in pairs:
        near.close()
        far.close()


def test_listener_refuses_those_that_wait_when_no_descriptor_is_left(
    listener: LimitedListener, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = [socket.create_connection(listener.getsockname(), 30) for _ in range(8)]
    listener.setblocking(False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                used.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(BlockingIOError):
            listener.accept()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in used:
            os.close(descriptor)
    assert all(is_closed(near) for near in waiting)
    assert len(caplog.records) == 1
    near, far = connect(listener)
    for end in (near, far, *waiting):
        end.close()
