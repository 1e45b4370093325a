"""A client of the coordinator's HTTP API, on the standard library alone."""

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
from shoal.wire.protocol import PROTOCOL

T = TypeVar("T")
SEVERAL_S = 3.0
# A request has a limit at the coordinator; a project may have more files than fit into one.
ASKED_AT_ONCE = 5_000


class ApiClient:
    """Asks one coordinator; the connection is kept, and opened again when it was lost."""

    def __init__(self, url: str, token: str, context: ssl.SSLContext | None = None, timeout_s: float = 10.0) -> None:
        self.url = url.rstrip("/")
        self.token = token
        self._context = context
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None

    def why_silent(self, timeout_s: float) -> Exception | None:
        """What keeps the coordinator from answering here within so many seconds; None if it does."""
        usual_s, self._timeout_s = self._timeout_s, timeout_s
        try:
            status, _ = self._once("GET", "/v1/health", None, {})
        except (OSError, http.client.HTTPException) as error:
            return error
        finally:
            self._timeout_s = usual_s
            self.close()
        return None if status == http.client.OK else http.client.HTTPException(f"it answered {status}")

    def health(self) -> Health:
        return self._ask("GET", "/v1/health", Health)

    def check(self) -> Health:
        """The coordinator's health, if it speaks our protocol."""
        health = self.health()
        if health.protocol != PROTOCOL:
            raise errors.VersionMismatch(
                f"the coordinator speaks protocol {health.protocol} (Shoal {health.shoal})",
                where=self.url,
                why=f"this is Shoal {__version__} with protocol {PROTOCOL}",
                do="install the same version of Shoal on both machines",
            )
        return health

    def runs(self) -> tuple[RunView, ...]:
        return self._ask("GET", "/v1/runs", tuple[RunView, ...])

    def submit(self, spec: RunSpec) -> RunView:
        return self._ask("POST", "/v1/runs", RunView, spec)

    def run(self, run: str) -> RunView:
        return self._ask("GET", f"/v1/runs/{quote(run, safe='')}", RunView)

    def story(self, run: str, member: str = "", after: int = 0, limit: int = 1000) -> tuple[StoryLine, ...]:
        query = {"member": member, "after": after, "limit": limit}
        return self._ask("GET", f"/v1/runs/{quote(run, safe='')}/story", tuple[StoryLine, ...], query=query)

    def logs(self, run: str, member: str = "", after: int = 0, limit: int = 1000) -> LogPage:
        query = {"member": member, "after": after, "limit": limit}
        return self._ask("GET", f"/v1/runs/{quote(run, safe='')}/logs", LogPage, query=query)

    def stop(self, run: str, ask: StopRequest) -> RunView:
        return self._ask("POST", f"/v1/runs/{quote(run, safe='')}/stop", RunView, ask)

    def scale(self, run: str, ask: ScaleRequest) -> RunView:
        return self._ask("POST", f"/v1/runs/{quote(run, safe='')}/scale", RunView, ask)

    def resume(self, run: str, ask: ScaleRequest | None = None) -> RunView:
        return self._ask("POST", f"/v1/runs/{quote(run, safe='')}/resume", RunView, ask)

    def agents(self) -> tuple[AgentView, ...]:
        return self._ask("GET", "/v1/agents", tuple[AgentView, ...])

    def examine(self, agent: str, question: CheckRequest) -> CheckResult:
        return self._ask("POST", f"/v1/agents/{quote(agent, safe='')}/examine", CheckResult, question)

    def pools(self) -> tuple[PoolView, ...]:
        return self._ask("GET", "/v1/pools", tuple[PoolView, ...])

    def send(self, contents: Mapping[str, Path | bytes]) -> int:
        """Let the coordinator have what has these hashes, as far as it does not; how many it lacked."""
        digests, missing = tuple(contents), list[str]()
        for at in range(0, len(digests), ASKED_AT_ONCE):
            missing += self._ask("POST", "/v1/blobs", tuple[str, ...], digests[at : at + ASKED_AT_ONCE])
        for digest in missing:
            found = contents[digest]
            with io.BytesIO(found) if isinstance(found, bytes) else found.open("rb") as data:
                status, answer = self._exchange("PUT", f"/v1/blobs/{digest}", data)
            if status >= 400:
                raise _problem(status, answer, self.url)
        return len(missing)

    def shutdown(self) -> None:
        self._ask("POST", "/v1/shutdown", Any)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(
        self,
        method: str,
        path: str,
        kind: type[T] | Any,
        body: object = None,
        query: Mapping[str, object] | None = None,
    ) -> T:
        asked = {name: value for name, value in (query or {}).items() if value not in ("", None)}
        target = path + (f"?{urlencode(asked)}" if asked else "")
        status, data = self._exchange(method, target, None if body is None else msgspec.json.encode(body))
        if status >= 400:
            raise _problem(status, data, self.url)
        try:
            answer: T = msgspec.json.decode(data or b"null", type=kind)
        except msgspec.DecodeError as error:
            raise errors.BadMessage("an answer that does not fit the API", where=self.url, why=str(error)) from error
        return answer

    def _exchange(self, method: str, target: str, body: bytes | BinaryIO | None) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self.token}", "Accept": "application/json"}
        if isinstance(body, bytes):
            headers["Content-Type"] = "application/json"
        reused = self._connection is not None
        try:
            return self._once(method, target, body, headers)
        except (OSError, http.client.HTTPException, ssl.SSLError) as error:
            self.close()
            # A kept connection may have been closed by the other side; only a question may be asked twice.
            if reused and method == "GET":
                return self._again(target, headers)
            raise self._unreachable(error) from error

    def _again(self, target: str, headers: dict[str, str]) -> tuple[int, bytes]:
        try:
            return self._once("GET", target, None, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._unreachable(error) from error

    def _once(
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
            do="see that it runs and that the URL is right: shoal ps",
        )


def open_client(url: str, token_file: str, timeout_s: float = 10.0) -> ApiClient:
    """A client of the coordinator at `url`, with the token, and the certificate if there is one, from its file.

    Of several URLs, with commas, the first is taken that answers with that certificate.
    """
    urls = addresses.split_list(url)
    for one in urls or (url,):
        if not _is_url(one):
            raise errors.UsageError(f"{one!r} is no URL of a coordinator", do="it looks like http://127.0.0.1:29300")
    from shoal.wire import credentials

    found = credentials.read(token_file)
    context = credentials.ssl_context(found)
    clients = [ApiClient(one, found.token, context, timeout_s) for one in urls]
    return clients[0] if len(clients) == 1 else _first(clients)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, or half an IPv6 address
        return False


def _first(clients: Sequence[ApiClient]) -> ApiClient:
    """The first of these, as they are listed, that answers; all are asked at once, and none for long."""
    with ThreadPoolExecutor(len(clients)) as threads:
        asked = [threads.submit(client.why_silent, SEVERAL_S) for client in clients]
        failures = {client.url: one.result() for client, one in zip(clients, asked, strict=True)}
    for client in clients:
        if failures[client.url] is None:
            return client
    raise errors.NoCoordinatorAddress(
        "the coordinator answers at none of its URLs",
        why=connect_errors.listed({url: error for url, error in failures.items() if error is not None}),
        do="see that it runs, and that its port is open for this machine",
    )


def _problem(status: int, data: bytes, url: str) -> errors.ShoalError:
    try:
        problem = msgspec.json.decode(data, type=ErrorView)
    except msgspec.DecodeError:
        text = data[:200].decode(errors="replace")
        return errors.MembershipError(f"the coordinator answered {status}", where=url, why=text)
    return as_error(problem, url)


def as_error(problem: ErrorView, where: str = "") -> errors.ShoalError:
    """The error that a problem describes, of its own class if this version knows the code."""
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.ShoalError)]
    kind = next((one for one in kinds if one.code == problem.code), errors.ShoalError)
    return kind(problem.what, where=problem.where or where, why=problem.why, do=problem.do)
