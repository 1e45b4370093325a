"""HTTP connections without a complete request are closed, also after earlier requests."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tests.process.coordinator.fakes import WAIT_S

from shoal.coordinator.server import idle_timeout
from shoal.coordinator.server.idle_timeout import IdleTimeoutProtocol

pytestmark = pytest.mark.process

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"


async def health(_request: Request) -> Response:
    return Response("well")


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(idle_timeout, "REQUEST_WITHIN_S", 0.5)
    config = uvicorn.Config(
        Starlette(routes=[Route("/health", health)]), http=IdleTimeoutProtocol, lifespan="off", log_level="warning"
    )
    server, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join(WAIT_S)


def answered(line: socket.socket, request: bytes) -> None:
    line.sendall(request)
    said = b""
    while not said.endswith(b"well"):
        more = line.recv(4096)
        assert more, said
        said += more


@pytest.mark.parametrize(
    ("whole", "rest"),
    [
        (b"", b""),
        (b"", b"GET /he"),
        (GET + b"\r\n", b"G"),
        (GET + b"Content-Length: 10\r\n\r\n", b"x"),
    ],
)
def test_incomplete_request_is_disconnected(address: tuple[str, int], whole: bytes, rest: bytes) -> None:
    with socket.create_connection(address, timeout=WAIT_S) as line:
        if whole:
            answered(line, whole)
        line.sendall(rest)
        assert line.recv(4096) == b""


def test_client_with_further_requests_stays_connected(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=WAIT_S) as line:
        for _ in range(5):
            answered(line, GET + b"\r\n")
