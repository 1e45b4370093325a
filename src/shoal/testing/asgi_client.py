"""HTTP connection to an ASGI application in the same process, without a socket."""

from __future__ import annotations

import asyncio
import email.message
import http.client
import io
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


class AsgiConnection(http.client.HTTPConnection):
    """Connection that calls the application; `fail(method, target)` may raise what a network would.

    A response is cut at the byte that `cut_at(method, target)` returns, as if the connection had broken there.
    """

    def __init__(
        self,
        app: App,
        fail: Callable[[str, str], None] = lambda _method, _target: None,
        cut_at: Callable[[str, str], int | None] = lambda _method, _target: None,
    ) -> None:
        super().__init__("127.0.0.1")
        self._app, self._fail, self._cut_at = app, fail, cut_at
        self._pending_request: tuple[str, str, bytes, Mapping[str, str]] | None = None

    def request(  # type: ignore[override]
        self, method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] = {}
    ) -> None:
        self._pending_request = (method, url, body or b"", headers)

    def getresponse(self) -> Any:
        assert self._pending_request is not None
        method, target, body, headers = self._pending_request
        self._fail(method, target)
        status, sent, data = asyncio.run(_respond(self._app, method, target, body, headers))
        return FakeResponse(status, sent, data, self._cut_at(method, target))

    def close(self) -> None:
        """Do nothing: no socket is open."""


class FakeResponse(io.BytesIO):
    """Response as `http.client` would return it."""

    def __init__(self, status: int, headers: email.message.Message, data: bytes, cut_at: int | None) -> None:
        super().__init__(data if cut_at is None else data[:cut_at])
        self.status, self.headers = status, headers


async def _respond(
    app: App, method: str, target: str, body: bytes, headers: Mapping[str, str]
) -> tuple[int, email.message.Message, bytes]:
    parts = urlsplit(target)
    scope = {
        "type": "http",
        "method": method,
        "path": unquote(parts.path),
        "raw_path": parts.path.encode(),
        "query_string": parts.query.encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "server": ("127.0.0.1", 80),
        "scheme": "http",
        "extensions": {},
    }
    response_headers, status, data = email.message.Message(), [500], bytearray()
    requests = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not requests:
            await asyncio.Event().wait()  # the client stays connected
        return requests.pop()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            status[0] = message["status"]
            for name, value in message["headers"]:
                response_headers[name.decode()] = value.decode()
        else:
            data.extend(message.get("body", b""))

    await app(scope, receive, send)
    return status[0], response_headers, bytes(data)
