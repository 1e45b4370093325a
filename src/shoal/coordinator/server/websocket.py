"""WebSockets whose messages go straight to who listens.

A beat is a few bytes that renew a lease. On the usual way it wakes a task, pauses and resumes the reading of its socket
and passes a dozen layers, which takes many times as long as the beat itself, and each connection keeps two tasks. With
a thousand members that would be most of what a coordinator does and holds. So whole frames are read and written here,
and the application is done with a connection as soon as it listens. What is unusual is left to the parser of
`websockets`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request

try:
    from websockets.speedups import apply_mask
except ImportError:  # there is not always a compiled one
    from websockets.utils import apply_mask

log = logging.getLogger("shoal.coordinator")

SCOPE = "shoal.socket"
MAX_WAITING = 10_000
PIECE_BYTES = 4 << 10
BINARY, PING, PONG = 0x82, 0x89, 0x8A
MASKED = 0x80
GOOD_BYE = 1000

Hear = Callable[[bytes | str], None]


class _NullQueue:
    """Where to put what nobody waits for."""

    def put_nowait(self, _event: object) -> None: ...


NOBODY = _NullQueue()


class DirectSocket(WebSocketsSansIOProtocol):
    """One connection. From `listen` on it calls for every message, and once when it is over."""

    _hear: Hear | None = None
    _gone: Callable[[], None] | None = None
    _unread = b""
    _parsed_here = True
    _ending = False
    scope: dict[str, Any]  # type: ignore[assignment]

    def listen(self, hear: Hear, gone: Callable[[], None]) -> None:
        """To be called as soon as the connection is accepted, before anything has come."""
        self._hear, self._gone = hear, gone
        self._unsent: deque[bytes] = deque()

    def say(self, data: bytes) -> bool:
        """Send a message, now or as soon as the other side takes it; False if too much waits already."""
        if self._unsent or not self.writable.is_set():
            self._unsent.append(data)
            return len(self._unsent) <= MAX_WAITING
        if not self.disconnected and not self.close_sent and not self.transport.is_closing():
            self._write(_head(BINARY, len(data)) + data)
        return True

    def _write(self, data: bytes) -> None:
        """What is encrypted in one piece stays in memory for as long as the connection does."""
        step = PIECE_BYTES if self.scheme == "wss" else len(data)
        for at in range(0, len(data), step):
            self.transport.write(data[at : at + step])

    def hang_up(self) -> None:
        """Close it, after what was said before."""
        self._ending = True
        self._be_gone()
        if not self._unsent:
            self._say_good_bye()
        elif self.close_timer is None:
            self.close_timer = self.loop.call_later(self.close_timeout, self.transport.abort)

    # --- the life of a connection

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:
            self.scope[SCOPE] = self

    async def run_asgi(self) -> None:
        try:
            await self.app(self.scope, self.receive, self.send)
        except ClientDisconnected:
            pass
        except Exception:
            # The outermost loop of one connection: it must not cost others theirs.
            log.exception("a connection could not be served")
            self.send_500_response()
        if self._hear is None:
            if self.close_timer is None:
                self.transport.close()
        else:
            # Nobody needs what the application asked and was told to begin with.
            self.scope, self.queue = {}, NOBODY  # type: ignore[assignment]
            del self.request, self.response

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._be_gone()

    def handle_close(self, event: Frame) -> None:
        super().handle_close(event)
        self._be_gone()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._be_gone()

    def resume_writing(self) -> None:
        super().resume_writing()
        waiting = self._unsent if self._hear is not None else ()
        while waiting and self.writable.is_set():
            self._write(_head(BINARY, len(waiting[0])) + waiting.popleft())
        if self._ending and not waiting:
            self._say_good_bye()

    def _say_good_bye(self) -> None:
        if not self.close_sent and not self.disconnected and not self.transport.is_closing():
            self.conn.send_close(GOOD_BYE)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
            if self.close_timer is None:
                self.close_timer = self.loop.call_later(self.close_timeout, self.transport.abort)

    def _be_gone(self) -> None:
        # Not at once: whoever hangs up may be in the middle of an event.
        if self._gone is not None:
            self.loop.call_soon(self._gone)
            self._gone = None

    # --- reading

    def data_received(self, data: bytes) -> None:
        if self._hear is None or not self._parsed_here:
            super().data_received(data)
            return
        if self._unread:
            data, self._unread = self._unread + data, b""
        at = 0
        while (found := _frame(data, at, self.config.ws_max_size)) is not None:
            begins, ends = found
            if not ends:
                self._unread = data[at:]
                return
            self._take(data[at], data[begins:ends], data[begins - 4 : begins])
            at = ends
        # Once the other parser has seen a part of a message, it must see all of it.
        self._parsed_here = False
        super().data_received(data[at:])

    def _take(self, kind: int, payload: bytes, mask: bytes) -> None:
        payload = apply_mask(payload, mask)
        if kind == BINARY:
            if self._hear is not None and not self.close_sent:
                self._hear(payload)
        elif kind == PING:
            self.transport.write(_head(PONG, len(payload)) + payload)
        elif payload == self.pending_ping_payload:
            self.handle_pong(Frame(PONG & 15, payload))  # type: ignore[arg-type]

    def send_receive_event_to_app(self) -> None:
        if self._hear is None:
            super().send_receive_event_to_app()
            return
        data, self.frames = b"".join(self.frames), []
        if not self.close_sent:
            self._hear(data if self.curr_msg_data_type == "bytes" else data.decode(errors="replace"))


def _head(kind: int, size: int) -> bytes:
    """The head of a whole frame from a server."""
    if size < 126:
        return bytes((kind, size))
    if size < 1 << 16:
        return bytes((kind, 126)) + size.to_bytes(2, "big")
    return bytes((kind, 127)) + size.to_bytes(8, "big")


def _frame(data: bytes, at: int, max_bytes: int) -> tuple[int, int] | None:
    """Where the payload of the frame at `at` begins and ends; (0, 0) if more has to come, None if it is unusual."""
    if len(data) < at + 2:
        return 0, 0
    kind, size, begins = data[at], data[at + 1] - MASKED, at + 6
    if kind not in (BINARY, PING, PONG) or size < 0 or (size > 125 and kind != BINARY):
        return None
    if size > 125:
        begins += 2 if size == 126 else 8
        if len(data) < begins:
            return 0, 0
        size = int.from_bytes(data[at + 2 : begins - 4], "big")
        if size > max_bytes:
            return None
    return (begins, begins + size) if len(data) >= begins + size else (0, 0)
