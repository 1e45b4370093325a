"""HTTP protocol with an idle timeout, so that silent clients cannot use up all file descriptors."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_WITHIN_S = 10.0


def _call_if_alive(action: weakref.WeakMethod[Callable[[], None]]) -> None:
    method = action()
    if method is not None:
        method()


class IdleTimeoutProtocol(H11Protocol):
    """Closes a connection on which no complete request arrives in time, also after an earlier request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def on_response_complete(self) -> None:
        self._timeout.cancel()
        self.scope = None  # type: ignore[assignment]
        super().on_response_complete()
        self._expect_request()

    def _expect_request(self) -> None:
        # A weak reference: the timer must not keep alive a connection that became a WebSocket.
        close = weakref.WeakMethod(self._close_if_silent)
        self._timeout = self.loop.call_later(REQUEST_WITHIN_S, _call_if_alive, close)

    def _close_if_silent(self) -> None:
        if self.scope is None and not self.transport.is_closing():
            self.transport.close()
