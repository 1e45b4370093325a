"""Strangers without a token, and clients that break off, cost neither descriptors nor the log."""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from tests.process.coordinator.fakes import WAIT_S, Coordinator, FakeMember

from shoal.testing.wait import until
from shoal.wire import member_messages as ms
from shoal.wire.protocol import RejectedMsg

pytestmark = pytest.mark.process

FEW_FILES = ("sh", "-c", 'ulimit -n 160; exec "$@"', "sh")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Coordinator]:
    coordinator = Coordinator(tmp_path / "c", "--host", "0.0.0.0", prefix=FEW_FILES)
    yield coordinator
    coordinator.close()


def log_of(coordinator: Coordinator) -> str:
    """Stop the coordinator and return what it has logged."""
    coordinator.process.send_signal(signal.SIGTERM)
    coordinator.process.wait(WAIT_S)
    return coordinator.process.stderr.read().decode()


def connected(coordinator: Coordinator, run: str) -> FakeMember | None:
    """Return a connected member; None if its connection was closed at the limit, after which clients try again."""
    with contextlib.suppress(OSError, EOFError):
        return FakeMember(coordinator, run, "m/0")
    return None


def test_silent_connections_keep_no_client_with_a_token_out(small: Coordinator) -> None:
    run = small.create(1, 1)
    address = urlsplit(small.url)
    silent = [socket.create_connection((address.hostname, address.port), WAIT_S) for _ in range(400)]
    try:
        member = until(lambda: connected(small, run), "a connection among silent ones").hello()
        member.hear(ms.WelcomeMsg)
        assert small.view(run)["members"][0]["member"] == "m/0"
        assert len(list(Path(f"/proc/{small.process.pid}/fd").iterdir())) < 160
    finally:
        for connection in silent:
            connection.close()
    member.close()
    log = log_of(small)
    assert "Traceback" not in log
    assert log.count("connections closed since the start") == 1
    assert len(log) < 10_000


def broken_requests(token: str, run: str) -> list[bytes]:
    """Return requests that end early, lie about their length or are none."""
    known = f"Host: 127.0.0.1\r\nAuthorization: {token}\r\n"
    return [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x00" * 100,
        f"POST /v1/runs HTTP/1.1\r\n{known}Content-Length: 5000\r\n\r\n{{".encode(),
        f"POST /v1/runs/{run}/stop HTTP/1.1\r\n{known}Content-Length: 9\r\n\r\n{{".encode(),
        f"PUT /v1/blobs/{'0' * 64} HTTP/1.1\r\n{known}Content-Length: 5000\r\n\r\nabc".encode(),
        f"PUT /v1/runs/{run}/files/outputs/x?upload={'a' * 16}&offset=0 HTTP/1.1\r\n{known}"
        "Content-Length: 9\r\n\r\nabc".encode(),
        f"POST /v1/runs HTTP/1.1\r\n{known}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode(),
        f"GET /v1/runs/%ff%fe/logs?after={'9' * 5000} HTTP/1.1\r\n{known}\r\n".encode(),
        f"GET /v1/runs/{run}/logs?member=%00%ff&limit=-1 HTTP/1.1\r\n{known}\r\n".encode(),
        f"GET /v1/member HTTP/1.1\r\n{known}Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n".encode(),
        f"GET /v1/member HTTP/1.1\r\n{known}Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n\x82\x7f\x7f\x7f\x7f\x7f".encode("latin-1"),
        f'POST /v1/runs HTTP/1.1\r\n{known}Content-Length: 4\r\n\r\n"\xff\xff"'.encode("latin-1"),
    ]


def test_broken_clients_leave_no_traceback(coordinator: Coordinator) -> None:
    run = coordinator.create(1, 1)
    address = urlsplit(coordinator.url)
    token = coordinator.credentials.headers["Authorization"]
    for request in broken_requests(token, run):
        for reset in (False, True):
            connection = socket.create_connection((address.hostname, address.port), WAIT_S)
            connection.sendall(request)
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            else:
                connection.shutdown(socket.SHUT_WR)
                with contextlib.suppress(OSError):
                    while connection.recv(4096):
                        pass
            connection.close()
    time.sleep(0.1)
    assert coordinator.view(run)["status"] == "starting"
    log = log_of(coordinator)
    assert "Traceback" not in log, log


NOT_BELIEVED = [
    {"type": "Ready", "fingerprint": "m", "step": None, "speed": math.nan},
    {"type": "Ready", "fingerprint": "m", "step": 1 << 63},
    {"type": "Leaving", "within_s": math.inf, "cause": "x"},
    {"type": "Done", "step": (1 << 64) - 1},
    {"type": "Heartbeat", "world": 1, "step": 1, "phase": "x", "phase_age_s": 0.0, "samples_per_s": math.inf},
    {"type": "Heartbeat", "world": 1, "step": 1, "phase": "x", "phase_age_s": 0.0, "idle": [None, math.nan]},
    {"type": "CheckpointWritten", "step": 1, "path": "x" * 70_000, "size_bytes": 0, "seconds": 0.0},
    {"type": "WorldBroken", "world": 1, "step": 0, "suspects": ["x"] * 70_000},
]


def test_odd_numbers_of_a_member_are_refused_and_the_coordinator_starts_again(coordinator: Coordinator) -> None:
    run = coordinator.create(1, 1)
    for fields in NOT_BELIEVED:
        member = FakeMember(coordinator, run, "m/0").hello()
        member.hear(ms.WelcomeMsg)
        member.socket.send(msgspec.msgpack.encode(fields))
        assert member.hear(RejectedMsg).code == "S208", fields
        member.close()
    honest = FakeMember(coordinator, run, "m/0").hello()
    honest.hear(ms.WelcomeMsg)
    honest.say(ms.ReadyMsg("m", None, speed=math.inf))
    world = honest.hear(ms.EnterWorldMsg).world
    honest.heartbeat(world.number, 3, loss=math.nan, samples_per_s=math.inf)
    coordinator.await_view(run, step=3)
    honest.close()
    coordinator.kill()
    coordinator.restart()
    assert coordinator.view(run)["loss"] is None
    assert "Traceback" not in log_of(coordinator)


ODD = [
    ({"settings": {"ports": "1-99999999999999999999"}}, "S101"),
    ({"settings": {"lease_s": "inf"}}, "S101"),
    ({"settings": {"lease_s": 0.5}}, "S101"),
    ({"settings": {"batch": "\u00b2"}}, "S101"),
    ({"settings": {"checkpoint.every_s": 1e30}}, "S101"),
    ({"settings": {"checkpoint.keep": 1 << 63}}, "S121"),
    ({"members": [1, 10**9]}, "S112"),
    ({"members": [-1, 0]}, "S112"),
    ({"priority": 1 << 63}, "S121"),
    ({"name": "x" * (1 << 19)}, "S121"),
    ({"name": "a\nb"}, "S118"),
    ({"name": "\x1b[2Jx"}, "S118"),
]


def test_odd_requests_are_refused_and_the_coordinator_starts_again(coordinator: Coordinator) -> None:
    spec = {"name": "t", "argv": ["t.py"], "cwd": "/tmp", "members": [1, 1]}
    for fields, code in ODD:
        status, problem = coordinator.ask("POST", "/v1/runs", {**spec, **fields})
        assert (status, problem.get("code")) == (400, code), fields
        assert len(str(problem)) < 2000
    run = coordinator.create(1, 1)
    assert coordinator.ask("POST", f"/v1/runs/{run}/scale", {"min": 1, "max": 20_000})[1]["code"] == "S112"
    assert coordinator.ask("POST", f"/v1/runs/{run}/scale", {"min": 1, "max": 10_000})[0] == 200
    coordinator.kill()
    coordinator.restart()
    assert coordinator.view(run)["members_max"] == 10_000
