"""HTTP connections that must say something soon."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_WITHIN_S = 10.0


def _if_alive(action: weakref.WeakMethod[Callable[[], None]]) -> None:
    found = action()
    if found is not None:
        found()


class IdleTimeoutProtocol(H11Protocol):
    """Closes a connection on which no request has arrived, so that the silent cannot use up all descriptors.

    Nor can those who have asked for something before: half of another request would be waited for without an end.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def on_response_complete(self) -> None:
        self._patience.cancel()
        self.scope = None  # type: ignore[assignment]
        super().on_response_complete()
        self._expect_request()

    def _expect_request(self) -> None:
        # Not kept alive for it: a connection that becomes a WebSocket needs none of this any more.
        silent = weakref.WeakMethod(self._close_if_silent)
        self._patience = self.loop.call_later(REQUEST_WITHIN_S, _if_alive, silent)

    def _close_if_silent(self) -> None:
        if self.scope is None and not self.transport.is_closing():
            self.transport.close()
