"""Client of the coordinator's HTTP API, on the standard library alone.

One connection is kept for reads. If the coordinator has closed it meanwhile, a GET is sent once more on a new one;
requests that change something always open a new connection and are never repeated, since the first attempt may have
been carried out. The client may be used by one thread at a time.
"""

from __future__ import annotations

import http.client
import io
import ssl
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from shoal import __version__, errors
from shoal.core import addresses
from shoal.wire import connect_errors
from shoal.wire.api import (
    AgentView,
    ErrorView,
    Health,
    LogPage,
    PoolView,
    RunSpec,
    RunView,
    ScaleRequest,
    StopRequest,
    StoryLine,
)
from shoal.wire.machine_check import CheckRequest, CheckResult
from shoal.wire.malformed import MALFORMED
from shoal.wire.protocol import PROTOCOL

T = TypeVar("T")
PROBE_TIMEOUT_S = 3.0
# The coordinator limits the size of a request, and a project may have more files than fit into one.
DIGESTS_PER_REQUEST = 5_000


class ApiClient:
    """Requests to one coordinator, over a connection that is kept and reopened when it was lost.

    Methods raise CoordinatorUnreachable if there is no answer, and otherwise the error that the coordinator names.
    """

    def __init__(self, url: str, token: str, context: ssl.SSLContext | None = None, timeout_s: float = 10.0) -> None:
        self.url = url.rstrip("/")
        self.token = token
        self._context = context
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None

    def another(self) -> ApiClient:
        """Return a client of the same coordinator with a connection of its own, for another thread."""
        return ApiClient(self.url, self.token, self._context, self._timeout_s)

    def probe(self, timeout_s: float) -> Exception | None:
        """Return why the coordinator does not answer a health check within so many seconds; None if it does."""
        usual_s, self._timeout_s = self._timeout_s, timeout_s
        try:
            status, _ = self._send_once("GET", "/v1/health", None, {})
        except (OSError, http.client.HTTPException) as error:
            return error
        finally:
            self._timeout_s = usual_s
            self.close()
        return None if status == http.client.OK else http.client.HTTPException(f"HTTP status {status}")

    def health(self) -> Health:
        return self._request("GET", "/v1/health", Health)

    def check(self) -> Health:
        """Return the coordinator's health; raise VersionMismatch unless it speaks our protocol."""
        health = self.health()
        if health.protocol != PROTOCOL:
            raise errors.VersionMismatch(
                f"the coordinator speaks protocol {health.protocol} (Shoal {health.shoal})",
                where=self.url,
                why=f"this is Shoal {__version__}, which speaks protocol {PROTOCOL}",
                do="install the same version of Shoal on both machines",
            )
        return health

    def runs(self) -> tuple[RunView, ...]:
        return self._request("GET", "/v1/runs", tuple[RunView, ...])

    def submit(self, spec: RunSpec) -> RunView:
        return self._request("POST", "/v1/runs", RunView, spec)

    def run(self, run: str) -> RunView:
        return self._request("GET", f"/v1/runs/{quote(run, safe='')}", RunView)

    def story(self, run: str, member: str = "", after: int = 0, limit: int = 1000) -> tuple[StoryLine, ...]:
        query = {"member": member, "after": after, "limit": limit}
        return self._request("GET", f"/v1/runs/{quote(run, safe='')}/story", tuple[StoryLine, ...], query=query)

    def logs(self, run: str, member: str = "", after: int = 0, limit: int = 1000) -> LogPage:
        query = {"member": member, "after": after, "limit": limit}
        return self._request("GET", f"/v1/runs/{quote(run, safe='')}/logs", LogPage, query=query)

    def stop(self, run: str, request: StopRequest) -> RunView:
        return self._request("POST", f"/v1/runs/{quote(run, safe='')}/stop", RunView, request)

    def scale(self, run: str, request: ScaleRequest) -> RunView:
        return self._request("POST", f"/v1/runs/{quote(run, safe='')}/scale", RunView, request)

    def resume(self, run: str, request: ScaleRequest | None = None) -> RunView:
        return self._request("POST", f"/v1/runs/{quote(run, safe='')}/resume", RunView, request)

    def agents(self) -> tuple[AgentView, ...]:
        return self._request("GET", "/v1/agents", tuple[AgentView, ...])

    def examine(self, agent: str, request: CheckRequest) -> CheckResult:
        return self._request("POST", f"/v1/agents/{quote(agent, safe='')}/examine", CheckResult, request)

    def pools(self) -> tuple[PoolView, ...]:
        return self._request("GET", "/v1/pools", tuple[PoolView, ...])

    def send(self, contents: Mapping[str, Path | bytes]) -> int:
        """Upload the blobs that the coordinator lacks, by their SHA-256; return how many that were."""
        digests, missing = tuple(contents), list[str]()
        for start in range(0, len(digests), DIGESTS_PER_REQUEST):
            batch = digests[start : start + DIGESTS_PER_REQUEST]
            missing += self._request("POST", "/v1/blobs", tuple[str, ...], batch)
        for digest in missing:
            content = contents[digest]
            with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as body:
                status, data = self._send("PUT", f"/v1/blobs/{digest}", body)
            if status >= 400:
                raise _error_of(status, data, self.url)
        return len(missing)

    def shutdown(self) -> None:
        self._request("POST", "/v1/shutdown", Any)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _request(
        self,
        method: str,
        path: str,
        kind: type[T] | Any,
        body: object = None,
        query: Mapping[str, object] | None = None,
    ) -> T:
        given = {name: value for name, value in (query or {}).items() if value not in ("", None)}
        target = path + (f"?{urlencode(given)}" if given else "")
        status, data = self._send(method, target, None if body is None else msgspec.json.encode(body))
        if status >= 400:
            raise _error_of(status, data, self.url)
        try:
            reply: T = msgspec.json.decode(data or b"null", type=kind)
        except MALFORMED as error:
            raise errors.BadMessage(
                "the coordinator sent an invalid response", where=f"{self.url}{path}", why=str(error)
            ) from error
        return reply

    def _send(self, method: str, target: str, body: bytes | BinaryIO | None) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self.token}", "Accept": "application/json"}
        if isinstance(body, bytes):
            headers["Content-Type"] = "application/json"
        reused = self._connection is not None
        try:
            return self._send_once(method, target, body, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            # The coordinator may have closed an idle connection. Only a GET is safe to repeat.
            if not (reused and method == "GET"):
                raise self._unreachable(error) from error
        try:
            return self._send_once("GET", target, None, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._unreachable(error) from error

    def _send_once(
        self, method: str, target: str, body: bytes | BinaryIO | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        if self._connection is None or method != "GET":
            self.close()
            self._connection = self._connect()
        self._connection.request(method, target, body=body, headers=headers)
        response = self._connection.getresponse()
        return response.status, response.read()

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        host, port = parts.hostname or "127.0.0.1", parts.port
        if parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._context)
        return http.client.HTTPConnection(host, port, timeout=self._timeout_s)

    def _unreachable(self, error: Exception) -> errors.CoordinatorUnreachable:
        return errors.CoordinatorUnreachable(
            "the coordinator does not answer",
            where=self.url,
            why=str(error) or type(error).__name__,
            do="check that it runs and that the URL is right: shoal ps",
        )


def open_client(url: str, token_file: str, timeout_s: float = 10.0) -> ApiClient:
    """Return a client for `url` with the token, and the certificate if there is one, from `token_file`.

    Of several URLs, separated by commas, the first that answers is taken.
    """
    urls = addresses.split_list(url)
    for candidate in urls or (url,):
        if not _is_url(candidate):
            raise errors.UsageError(f"invalid coordinator URL {candidate!r}", do="write it like http://127.0.0.1:29300")
    from shoal.wire import credentials

    access = credentials.read(token_file, *urls)
    context = credentials.ssl_context(access)
    clients = [ApiClient(candidate, access.token, context, timeout_s) for candidate in urls]
    return clients[0] if len(clients) == 1 else _first_reachable(clients)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port, or half an IPv6 address
        return False


def _first_reachable(clients: Sequence[ApiClient]) -> ApiClient:
    """Probe all clients at the same time; return the first in their order that answers."""
    with ThreadPoolExecutor(len(clients)) as threads:
        probes = [threads.submit(client.probe, PROBE_TIMEOUT_S) for client in clients]
        failures = {client.url: probe.result() for client, probe in zip(clients, probes, strict=True)}
    for client in clients:
        if failures[client.url] is None:
            return client
    raise errors.NoCoordinatorAddress(
        "the coordinator answers at none of its URLs",
        why=connect_errors.describe_all({url: error for url, error in failures.items() if error is not None}),
        do="check that it runs and that this machine can reach its port",
    )


def _error_of(status: int, data: bytes, url: str) -> errors.ShoalError:
    """Return the error that a response describes."""
    try:
        problem = msgspec.json.decode(data, type=ErrorView)
    except MALFORMED:
        text = data[:200].decode(errors="replace")
        return errors.MembershipError(f"the coordinator answered HTTP status {status}", where=url, why=text)
    return errors.from_code(problem.code, problem.what, where=problem.where or url, why=problem.why, do=problem.do)
