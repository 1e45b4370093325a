"""Who may talk to the coordinator: whoever has its token, from a place that is not a foreign web page."""

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
OWNERS_PATHS = ("/v1/shutdown",)
USER = "shoal.user"
MAX_FAILURES = 30
WINDOW_S = 10.0
MAX_CLIENTS = 1000
HEARD_S = 5.0


class FailedLogins:
    """How often each client came with a wrong token lately."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}

    def too_many(self, client: str, now: float) -> bool:
        """Count one more."""
        if client not in self._times and len(self._times) >= MAX_CLIENTS:
            self._times.clear()
        times = self._times.setdefault(client, deque(maxlen=MAX_FAILURES + 1))
        times.append(now)
        while now - times[0] > WINDOW_S:
            times.popleft()
        return len(times) > MAX_FAILURES


class AuthMiddleware:
    """Lets authenticated requests and sockets through to the app, and answers the others itself.

    Users ask for runs; only who has the coordinator's own token may be an agent or a member, or end the coordinator.
    """

    def __init__(self, app: App, keys: TokenStore, loopback_only: bool) -> None:
        self._app, self._keys = app, keys
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
            await _answer(scope, receive, send, *refusal)

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> tuple[int, ErrorView] | None:
        foreign = why_foreign(headers.get(b"host", b""), headers.get(b"origin", b""), self._loopback_only)
        if foreign:
            return 403, ErrorView(WrongToken.code, "the request was not meant for this coordinator", why=foreign)
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            return None
        user = self._keys.who(headers.get(b"authorization", b""))
        if user is not None:
            scope[USER] = user
            if user == OWNER or (scope["type"] == "http" and scope["path"] not in OWNERS_PATHS):
                return None
            return 403, ErrorView(
                PermissionDenied.code, f"{user} may not do this", do="use the coordinator's own token file"
            )
        client = str((scope.get("client") or ("",))[0])
        if self._failures.too_many(client, time.monotonic()):
            return 429, ErrorView(WrongToken.code, "too many wrong tokens", do="wait ten seconds")
        given = b"authorization" in headers
        what = "the token is not this coordinator's" if given else "a token is needed"
        return 401, ErrorView(WrongToken.code, what, do="pass the coordinator's token file with --token-file")


def why_foreign(host: bytes, origin: bytes, loopback_only: bool) -> str:
    """Why a request looks like it comes through somebody's web page, empty if it does not."""
    name = host_name(host.decode("latin-1"))
    if loopback_only and not is_loopback(name):
        return f"the host {name!r} is not this machine's own"
    if origin:
        came_from = origin.decode("latin-1").partition("://")[2]
        if came_from != host.decode("latin-1"):
            return f"it comes from a page of {came_from or 'nowhere'!r}"
    return ""


def host_name(host: str) -> str:
    """A host header without its port."""
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


async def _answer(scope: Scope, receive: Receive, send: Send, status: int, problem: ErrorView) -> None:
    body = msgspec.json.encode(problem)
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    prefix = "http"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008, "reason": problem.what})
            return
        await receive()
        prefix = "websocket.http"
    else:
        await _hear_out(receive)
    await send({"type": f"{prefix}.response.start", "status": status, "headers": headers})
    await send({"type": f"{prefix}.response.body", "body": body})


async def _hear_out(receive: Receive) -> None:
    """Read what a request still has to say: if it is cut short, its client hears of that instead of the answer."""
    more = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HEARD_S):
            while more:
                more = (await receive()).get("more_body", False)
