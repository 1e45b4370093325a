"""A member's WebSocket to the coordinator: reconnects whenever it is lost, and renews the lease.

Training never waits for it. What must not be lost while it is down is sent again after the next hello. Every heartbeat
renews the lease at the coordinator; now and then one carries a ping. A coordinator that does not answer for longer than
a lease is treated as lost, and the member connects again: a half-open TCP connection would otherwise never be noticed.
"""

from __future__ import annotations

import contextlib
import socket as sockets
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import websockets.exceptions
from websockets.sync.client import ClientConnection, connect

from shoal.errors import BadMessage
from shoal.wire import codec, credentials
from shoal.wire import member_messages as messages
from shoal.wire.protocol import Message, RejectedMsg

RETRY_S = (0.05, 0.1, 0.2, 0.4)
OPEN_TIMEOUT_S = 3.0
PINGS_PER_SILENCE = 4


class MemberUplink:
    """One WebSocket after another: one thread connects and receives, another sends heartbeats.

    `on_connect(send, attach)` sends the hello on a new socket and then attaches it; nothing is sent on it before.
    `on_message` handles every message, in the receiving thread. `heartbeat` returns the next heartbeat. `on_failure` is
    called if one of them raises: then the thread ends, and the member has no uplink any more.
    """

    def __init__(
        self,
        url: str,
        access: credentials.Credentials,
        on_connect: Callable[[Callable[[Message], None], Callable[[], None]], None],
        on_message: Callable[[Any], None],
        heartbeat: Callable[[], messages.HeartbeatMsg],
        heartbeat_s: float,
        silence_limit_s: float,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._address = url.replace("http", "ws", 1).rstrip("/") + "/v1/member"
        self._access = access
        self._on_connect = on_connect
        self._on_message = on_message
        self._heartbeat = heartbeat
        self._on_failure = on_failure
        self.heartbeat_s = heartbeat_s
        self._silence_limit_s = silence_limit_s
        self._socket: ClientConnection | None = None
        self._pong_at = 0.0
        self._refused_at = 0.0
        self._down_since: float | None = time.monotonic()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(self._receive,), name="shoal-uplink", daemon=True),
            threading.Thread(target=self._run, args=(self._send_heartbeats,), name="shoal-heartbeat", daemon=True),
        ]

    def open(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def down_for_s(self) -> float:
        """Seconds since the connection was lost, 0 while it is up."""
        since = self._down_since
        return 0.0 if since is None else time.monotonic() - since

    def may_step_alone(self, lease_s: float) -> bool:
        """Return whether a world of one may commit: its lease is fresh, or no coordinator could form another world.

        A refused connection means that the coordinator's process is down. Silence may mean that only we are cut off.
        """
        return time.monotonic() - max(self._pong_at, self._refused_at) < lease_s

    def send(self, message: Message) -> bool:
        """Send a message if the connection is up; return whether it was sent."""
        socket = self._socket
        if socket is None:
            return False
        try:
            socket.send(codec.from_member.encode(message))
        except (OSError, websockets.exceptions.WebSocketException):
            return False
        return True

    def close(self) -> None:
        """Close after a last heartbeat, so that the final figures reach the coordinator."""
        self._closing.set()
        self.send(self._heartbeat())
        socket = self._socket
        if socket is not None:
            socket.close()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the outer loop of both threads: the main thread must hear of it
            self._on_failure(error)

    def _receive(self) -> None:
        attempt = 0
        while not self._closing.is_set():
            try:
                with self._connect() as socket:
                    attempt = 0
                    self._pong_at = time.monotonic()
                    self._on_connect(partial(_send, socket), partial(self._attach, socket))
                    for frame in socket:
                        self._on_message(codec.to_member.decode(frame))
            except ConnectionRefusedError:
                self._refused_at = time.monotonic()
            except websockets.exceptions.InvalidStatus as error:
                self._on_message(_rejection(error))
            except (OSError, websockets.exceptions.WebSocketException, BadMessage):
                pass  # the next hello tells the coordinator everything it must know
            self._socket = None
            if self._down_since is None:
                self._down_since = time.monotonic()
            self._closing.wait(RETRY_S[min(attempt, len(RETRY_S) - 1)])
            attempt += 1

    def _attach(self, socket: ClientConnection) -> None:
        self._socket, self._down_since = socket, None

    def _connect(self) -> ClientConnection:
        return connect(
            self._address,
            ssl=credentials.ssl_context(self._access),
            additional_headers=self._access.headers,
            open_timeout=OPEN_TIMEOUT_S,
            close_timeout=0.5,
            ping_interval=None,
            compression=None,
            proxy=None,
            max_size=codec.MAX_MESSAGE_BYTES,
        )

    def _is_ping_due(self) -> bool:
        """Return whether to ping with the next heartbeat; not with each one, the coordinator has many members."""
        return time.monotonic() - self._pong_at > self._silence_limit_s / PINGS_PER_SILENCE

    def _send_heartbeats(self) -> None:
        """Send heartbeats, and close the connection when the coordinator no longer answers pings."""
        while not self._closing.wait(self.heartbeat_s):
            socket = self._socket
            if socket is None:
                continue
            if not self._is_ping_due():
                self.send(self._heartbeat())
                continue
            try:
                with _in_one_packet(socket):
                    if not self.send(self._heartbeat()):
                        continue
                    pong = socket.ping(ack_on_close=False)
            except (OSError, websockets.exceptions.WebSocketException):
                continue
            if pong.wait(self.heartbeat_s):
                self._pong_at = time.monotonic()
            elif time.monotonic() - self._pong_at > self._silence_limit_s:
                socket.close_socket()


@contextlib.contextmanager
def _in_one_packet(socket: ClientConnection) -> Iterator[None]:
    """Send everything written inside in one packet, where the system can, so that the coordinator wakes up once."""
    cork = getattr(sockets, "TCP_CORK", None)
    if cork is None:
        yield
        return
    socket.socket.setsockopt(sockets.IPPROTO_TCP, cork, 1)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            socket.socket.setsockopt(sockets.IPPROTO_TCP, cork, 0)


def _send(socket: ClientConnection, message: Message) -> None:
    socket.send(codec.from_member.encode(message))


def _rejection(error: websockets.exceptions.InvalidStatus) -> RejectedMsg:
    status = error.response.status_code
    if status in (401, 403):
        return RejectedMsg(
            "S201",
            "the coordinator does not accept this token",
            why=f"it answered {status}",
            do="pass the coordinator's own token file",
        )
    return RejectedMsg("S207", "the coordinator refused the connection", why=f"it answered {status}")
