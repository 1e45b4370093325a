"""Authentication: lets requests with a valid token through, unless a foreign web page may have caused them.

A browser sends requests on behalf of any page it shows, also to loopback. So the `Host` header must name this machine
while the coordinator listens on loopback only (a page could otherwise use DNS rebinding), and an `Origin` header, which
browsers add, must be the coordinator's own. Then the token decides who the user is; see the package docstring.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from shoal.coordinator.http.tokens import OWNER, TokenStore
from shoal.errors import PermissionDenied, WrongToken
from shoal.wire.api import ErrorView

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/v1/health",)
OWNER_PATHS = ("/v1/shutdown",)
USER = "shoal.user"
MAX_FAILURES = 30
WINDOW_S = 10.0
MAX_CLIENTS = 1000
DRAIN_S = 5.0


class FailedLogins:
    """Counter of recent requests with a wrong token, by client."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}

    def too_many(self, client: str, now: float) -> bool:
        """Count one more failure and return whether this client has had too many."""
        if client not in self._times and len(self._times) >= MAX_CLIENTS:
            self._times.clear()
        times = self._times.setdefault(client, deque(maxlen=MAX_FAILURES + 1))
        times.append(now)
        while now - times[0] > WINDOW_S:
            times.popleft()
        return len(times) > MAX_FAILURES


class AuthMiddleware:
    """ASGI middleware that passes authenticated requests and WebSockets on and replies to all others itself.

    `admit` is called with the client of each connection that has shown a valid token.
    """

    def __init__(
        self, app: App, tokens: TokenStore, loopback_only: bool, admit: Callable[[tuple[str, int]], None]
    ) -> None:
        self._app, self._tokens, self._admit = app, tokens, admit
        self._loopback_only = loopback_only
        self._failures = FailedLogins()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        refusal = self._refusal(scope, headers)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await _reply(scope, receive, send, *refusal)

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> tuple[int, ErrorView] | None:
        """Return the HTTP status and error of a request that must not pass; put the user of others into the scope."""
        foreign = why_foreign(headers.get(b"host", b""), headers.get(b"origin", b""), self._loopback_only)
        if foreign:
            return 403, ErrorView(WrongToken.code, "the request was not meant for this coordinator", why=foreign)
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            return None
        user = self._tokens.user_of(headers.get(b"authorization", b""))
        if user is not None:
            scope[USER] = user
            self._admit(tuple(scope.get("client") or ("", 0)))
            if user == OWNER or (scope["type"] == "http" and scope["path"] not in OWNER_PATHS):
                return None
            what, do = f"user {user} may not do this", "use the coordinator's own token file"
            return 403, ErrorView(PermissionDenied.code, what, do=do)
        client = str((scope.get("client") or ("",))[0])
        if self._failures.too_many(client, time.monotonic()):
            return 429, ErrorView(WrongToken.code, "too many wrong tokens", do="wait ten seconds")
        what = "wrong token for this coordinator" if b"authorization" in headers else "a token is required"
        return 401, ErrorView(WrongToken.code, what, do="pass the coordinator's token file with --token-file")


def why_foreign(host: bytes, origin: bytes, loopback_only: bool) -> str:
    """Return why a request may have been caused by a foreign web page, empty if it was not."""
    name = host_name(host.decode("latin-1"))
    if loopback_only and not is_loopback(name):
        return f"host {name!r} is not this machine"
    if origin:
        page = origin.decode("latin-1").partition("://")[2]
        if page != host.decode("latin-1"):
            return f"it comes from a page of {page or 'nowhere'!r}"
    return ""


def host_name(host: str) -> str:
    """Return a Host header without its port.

    >>> host_name("[::1]:80"), host_name("lab:80"), host_name("::1")
    ('::1', 'lab', '::1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _reply(scope: Scope, receive: Receive, send: Send, status: int, error: ErrorView) -> None:
    body = msgspec.json.encode(error)
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    prefix = "http"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008, "reason": error.what})
            return
        await receive()
        prefix = "websocket.http"
    else:
        await _drain(receive)
    await send({"type": f"{prefix}.response.start", "status": status, "headers": headers})
    await send({"type": f"{prefix}.response.body", "body": body})


async def _drain(receive: Receive) -> None:
    """Drain the request body before replying, or the client sees a broken pipe instead of our error."""
    more = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while more:
                more = (await receive()).get("more_body", False)
