"""A member's line to the coordinator: it finds it again whenever it is lost, and renews the lease.

Training never waits for it. What must not be lost while the line is down is said again in the next hello.
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
ASKS_PER_SILENCE = 4


class MemberUplink:
    """One WebSocket after another, in a thread of its own.

    `greet(say, attach)` says hello on a new socket and attaches it; nothing else is sent on it before.
    """

    def __init__(
        self,
        url: str,
        access: credentials.Credentials,
        greet: Callable[[Callable[[Message], None], Callable[[], None]], None],
        heard: Callable[[Any], None],
        beat: Callable[[], messages.HeartbeatMsg],
        heartbeat_s: float,
        silence_s: float,
    ) -> None:
        self._address = url.replace("http", "ws", 1).rstrip("/") + "/v1/member"
        self._access = access
        self._greet = greet
        self._heard = heard
        self._beat = beat
        self.heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self._socket: ClientConnection | None = None
        self._pong_at = 0.0
        self._refused_at = 0.0
        self._down_since: float | None = time.monotonic()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._listen, name="shoal-link", daemon=True),
            threading.Thread(target=self._renew, name="shoal-beat", daemon=True),
        ]

    def open(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def down_for_s(self) -> float:
        """How long the coordinator has not been reached, 0 if it is."""
        since = self._down_since
        return 0.0 if since is None else time.monotonic() - since

    def may_step_alone(self, lease_s: float) -> bool:
        """Whether a world of one may commit: its lease is fresh, or nobody is there who could form another world.

        A refused connection means that the coordinator's process is down; silence might mean that only we are cut off.
        """
        return time.monotonic() - max(self._pong_at, self._refused_at) < lease_s

    def send(self, message: Message) -> bool:
        """Send now if the line is up; False if it is not."""
        socket = self._socket
        if socket is None:
            return False
        try:
            socket.send(codec.from_member.encode(message))
        except (OSError, websockets.exceptions.WebSocketException):
            return False
        return True

    def close(self) -> None:
        """Hang up, after a last beat: the figures of the end are those that people look at."""
        self._closing.set()
        self.send(self._beat())
        socket = self._socket
        if socket is not None:
            socket.close()

    def _listen(self) -> None:
        attempt = 0
        while not self._closing.is_set():
            try:
                with self._connect() as socket:
                    attempt = 0
                    self._pong_at = time.monotonic()
                    self._greet(partial(_say, socket), partial(self._attach, socket))
                    for frame in socket:
                        self._heard(codec.to_member.decode(frame))
            except ConnectionRefusedError:
                self._refused_at = time.monotonic()
            except websockets.exceptions.InvalidStatus as error:
                self._heard(_refusal(error))
            except (OSError, websockets.exceptions.WebSocketException, BadMessage):
                pass  # the next attempt says hello again, with all that the coordinator must know
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

    def _asks(self) -> bool:
        """Whether it is time to see that the coordinator still answers; not with every beat, it has many to answer."""
        return time.monotonic() - self._pong_at > self._silence_s / ASKS_PER_SILENCE

    def _renew(self) -> None:
        """Beat, and hang up on a coordinator that no longer answers, so that it is sought anew."""
        while not self._closing.wait(self.heartbeat_s):
            socket = self._socket
            if socket is None:
                continue
            if not self._asks():
                self.send(self._beat())
                continue
            try:
                with _in_one_packet(socket):
                    if not self.send(self._beat()):
                        continue
                    answered = socket.ping(ack_on_close=False)
            except (OSError, websockets.exceptions.WebSocketException):
                continue
            if answered.wait(self.heartbeat_s):
                self._pong_at = time.monotonic()
            elif time.monotonic() - self._pong_at > self._silence_s:
                socket.close_socket()


@contextlib.contextmanager
def _in_one_packet(socket: ClientConnection) -> Iterator[None]:
    """Let the coordinator be woken once for all that is sent meanwhile, where the system can do that."""
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


def _say(socket: ClientConnection, message: Message) -> None:
    socket.send(codec.from_member.encode(message))


def _refusal(error: websockets.exceptions.InvalidStatus) -> RejectedMsg:
    status = error.response.status_code
    if status in (401, 403):
        return RejectedMsg(
            "S201",
            "the coordinator does not accept this token",
            why=f"it answered {status}",
            do="pass the coordinator's own token file",
        )
    return RejectedMsg("S207", "the coordinator refused the connection", why=f"it answered {status}")
