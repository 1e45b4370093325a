"""WebSockets whose messages go straight to a callback, without a task per connection.

A heartbeat is a few bytes that renew a lease. Through the usual stack it wakes a task, pauses and resumes reading and
passes a dozen layers, which takes many times as long as handling it, and each connection keeps two tasks. With a
thousand members that would be most of what a coordinator does and holds. So whole binary frames, pings and pongs are
read and written here, and the ASGI application is done with a connection as soon as it listens. Everything unusual
(fragments, text, close frames) is left to the parser of `websockets`, which then handles the rest of the connection.
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
from websockets.protocol import State

try:
    from websockets.speedups import apply_mask
except ImportError:  # not every wheel has the compiled version
    from websockets.utils import apply_mask

log = logging.getLogger("shoal.coordinator")

SCOPE = "shoal.socket"
MAX_UNSENT = 10_000
CHUNK_BYTES = 4 << 10
BINARY, PING, PONG = 0x82, 0x89, 0x8A
MASKED = 0x80
NORMAL_CLOSURE = 1000

OnMessage = Callable[[bytes | str], None]


class _NullQueue:
    """Queue that drops everything, for events that no application waits for."""

    def put_nowait(self, _event: object) -> None: ...


NULL_QUEUE = _NullQueue()


class DirectSocket(WebSocketsSansIOProtocol):
    """One WebSocket; after `listen` it calls back for every message, and once when it is closed."""

    _on_message: OnMessage | None = None
    _on_close: Callable[[], None] | None = None
    _unread = b""
    _fast_path = True
    _closing = False
    scope: dict[str, Any]  # type: ignore[assignment]

    def listen(self, on_message: OnMessage, on_close: Callable[[], None]) -> None:
        """Set the callbacks; to be called when the connection was accepted, before anything has arrived."""
        self._on_message, self._on_close = on_message, on_close
        self._unsent: deque[bytes] = deque()

    def send_message(self, data: bytes) -> bool:
        """Send a message, or queue it while the peer reads slowly; return False if too many are queued."""
        if self._unsent or not self.writable.is_set():
            self._unsent.append(data)
            return len(self._unsent) <= MAX_UNSENT
        if not self.disconnected and not self.close_sent and not self.transport.is_closing():
            self._write(_head(BINARY, len(data)) + data)
        return True

    def _write(self, data: bytes) -> None:
        """Write in small chunks under TLS, whose buffer stays as large as the largest write."""
        size = CHUNK_BYTES if self.scheme == "wss" else len(data)
        for at in range(0, len(data), size):
            self.transport.write(data[at : at + size])

    def close_after_sending(self) -> None:
        """Close the connection once all queued messages are sent."""
        self._closing = True
        self._notify_closed()
        if not self._unsent:
            self._send_close()
        elif self.close_timer is None:
            self.close_timer = self.loop.call_later(self.close_timeout, self.transport.abort)

    # --- life cycle

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
            # The outermost frame of one connection: its failure must not end the others.
            log.exception("a connection could not be served")
            self.send_500_response()
        if self._on_message is None:
            if self.close_timer is None:
                self.transport.close()
        else:
            # Free what was only needed for the handshake.
            self.scope, self.queue = {}, NULL_QUEUE  # type: ignore[assignment]
            del self.request, self.response

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._notify_closed()

    def handle_close(self, event: Frame) -> None:
        super().handle_close(event)
        self._notify_closed()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._notify_closed()

    def resume_writing(self) -> None:
        super().resume_writing()
        unsent = self._unsent if self._on_message is not None else ()
        while unsent and self.writable.is_set():
            self._write(_head(BINARY, len(unsent[0])) + unsent.popleft())
        if self._closing and not unsent:
            self._send_close()

    def _send_close(self) -> None:
        # A peer that sent a message and a close at once is closing already; the parser has answered it.
        is_open = self.conn.state is State.OPEN and not self.transport.is_closing()
        if is_open and not self.close_sent and not self.disconnected:
            self.conn.send_close(NORMAL_CLOSURE)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
            if self.close_timer is None:
                self.close_timer = self.loop.call_later(self.close_timeout, self.transport.abort)

    def _notify_closed(self) -> None:
        # Not at once: the caller may be in the middle of an event.
        if self._on_close is not None:
            self.loop.call_soon(self._on_close)
            self._on_close = None

    # --- reading

    def data_received(self, data: bytes) -> None:
        if self._on_message is None or not self._fast_path:
            super().data_received(data)
            return
        if self._unread:
            data, self._unread = self._unread + data, b""
        at = 0
        while (payload := _frame(data, at, self.config.ws_max_size)) is not None:
            start, end = payload
            if not end:
                self._unread = data[at:]
                return
            self._on_frame(data[at], data[start:end], data[start - 4 : start])
            at = end
        # The other parser must see whole messages, so it gets everything from here on.
        self._fast_path = False
        super().data_received(data[at:])

    def _on_frame(self, kind: int, payload: bytes, mask: bytes) -> None:
        payload = apply_mask(payload, mask)
        if kind == BINARY:
            if self._on_message is not None and not self.close_sent:
                self._on_message(payload)
        elif kind == PING:
            self.transport.write(_head(PONG, len(payload)) + payload)
        elif payload == self.pending_ping_payload:
            self.handle_pong(Frame(PONG & 15, payload))  # type: ignore[arg-type]

    def send_receive_event_to_app(self) -> None:
        if self._on_message is None:
            super().send_receive_event_to_app()
            return
        data, self.frames = b"".join(self.frames), []
        if not self.close_sent:
            self._on_message(data if self.curr_msg_data_type == "bytes" else data.decode(errors="replace"))


def _head(kind: int, size: int) -> bytes:
    """Return the header of an unfragmented, unmasked frame."""
    if size < 126:
        return bytes((kind, size))
    if size < 1 << 16:
        return bytes((kind, 126)) + size.to_bytes(2, "big")
    return bytes((kind, 127)) + size.to_bytes(8, "big")


def _frame(data: bytes, at: int, max_bytes: int) -> tuple[int, int] | None:
    """Return where the payload of the frame at `at` starts and ends; (0, 0) if incomplete, None if it is unusual."""
    if len(data) < at + 2:
        return 0, 0
    kind, size, start = data[at], data[at + 1] - MASKED, at + 6
    if kind not in (BINARY, PING, PONG) or size < 0 or (size > 125 and kind != BINARY):
        return None
    if size > 125:
        start += 2 if size == 126 else 8
        if len(data) < start:
            return 0, 0
        size = int.from_bytes(data[at + 2 : start - 4], "big")
        if size > max_bytes:
            return None
    return (start, start + size) if len(data) >= start + size else (0, 0)
