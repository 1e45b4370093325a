"""Routes: the coordinator's one port, with an HTTP API for people and tools and WebSockets for members and agents."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

import shoal
from shoal.coordinator.agent_handler import AgentHandler
from shoal.coordinator.connections import AgentConnection, Connection, MemberConnection
from shoal.coordinator.http.auth import USER
from shoal.coordinator.http.commands import RunCommands
from shoal.coordinator.http.file_routes import FileRoutes
from shoal.coordinator.http.tokens import OWNER
from shoal.coordinator.member_handler import MAX_NAME, MemberHandler
from shoal.coordinator.server.websocket import SCOPE, OnMessage
from shoal.coordinator.service import CoordinatorService
from shoal.coordinator.storage import logs
from shoal.coordinator.storage.blobs import ENVIRONMENT_BLOBS, FOLDER, Blobs
from shoal.coordinator.storage.run_files import RunFiles
from shoal.errors import (
    BadMessage,
    BadRequest,
    EventUnstorable,
    PermissionDenied,
    ShoalError,
    StorageError,
    UnknownBlob,
    UnknownFile,
    UnknownRun,
    UploadCorrupt,
)
from shoal.wire import codec
from shoal.wire.api import ErrorView, Health, ScaleRequest, SetupReport, StopRequest, SubmitRequest
from shoal.wire.machine_check import CheckRequest
from shoal.wire.malformed import MALFORMED
from shoal.wire.protocol import PROTOCOL

HELLO_WITHIN_S = 10.0
SHUT_DOWN_WITHIN_S = 10.0
MAX_BODY_BYTES = 1 << 20
MAX_LINES = 10_000
MAX_POSITION = 1 << 62
CLIENT_GONE = 499

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]


class ApiRoutes:
    """Endpoints around one service. `shut_down` ends the process once a shutdown was requested and runs have stopped.

    Users name runs by id, name or prefix; see `RunCommands.find`.
    """

    def __init__(self, service: CoordinatorService, shut_down: Callable[[], None]) -> None:
        self._service = service
        self._members = MemberHandler(service)
        self.agent_handler = AgentHandler(service)
        self._commands = RunCommands(service)
        self.blobs, self._environments = Blobs(service.directory / FOLDER), Blobs(service.directory / ENVIRONMENT_BLOBS)
        self.files = RunFiles(service.run_dir)
        self._file_routes = FileRoutes(self.files, lambda user, run: self._commands.find_readable(user, run).name)
        self._shut_down = shut_down
        self._shutting_down: asyncio.Task[None] | None = None

    def routes(self) -> list[Route | WebSocketRoute]:
        """Return all routes."""
        return [
            Route("/v1/health", _json(self.health)),
            Route("/v1/runs", _json(self.runs)),
            Route("/v1/runs", _json(self.create), methods=["POST"]),
            Route("/v1/runs/{run}", _json(self.run)),
            Route("/v1/runs/{run}/story", _json(self.story)),
            Route("/v1/runs/{run}/logs", _json(self.logs)),
            Route("/v1/runs/{run}/stop", _json(self.stop), methods=["POST"]),
            Route("/v1/runs/{run}/scale", _json(self.scale), methods=["POST"]),
            Route("/v1/runs/{run}/resume", _json(self.resume), methods=["POST"]),
            *(Route(path, _json(handler), methods=[method]) for path, method, handler in self._file_routes.endpoints()),
            Route("/v1/agents", _json(self.agents)),
            Route("/v1/agents/{agent}/examine", _json(self.check_machine), methods=["POST"]),
            Route("/v1/pools", _json(self.pools)),
            Route("/v1/allocations/{allocation}", _json(self.report_setup), methods=["POST"]),
            Route("/v1/blobs", _json(self.missing_blobs), methods=["POST"]),
            Route("/v1/blobs/{digest}", _json(self.put_blob), methods=["PUT"]),
            Route("/v1/blobs/{digest}", self.blob),
            Route("/v1/shutdown", _json(self.shutdown), methods=["POST"]),
            Route("/metrics", self.metrics),
            WebSocketRoute("/v1/member", self.member),
            WebSocketRoute("/v1/agent", self.agent),
        ]

    async def health(self, _request: Request) -> object:
        return Health(shoal.__version__, PROTOCOL, self._service.name)

    async def runs(self, _request: Request) -> object:
        return self._service.views.runs()

    async def create(self, request: Request) -> object:
        return self._commands.create((await _body(request, SubmitRequest)).spec(), _user(request))

    async def run(self, request: Request) -> object:
        return self._service.views.run(self._commands.find(request.path_params["run"]).name)

    async def story(self, request: Request) -> object:
        run = self._commands.find_readable(_user(request), request.path_params["run"])
        member, after, limit = _page(request)
        return await self._service.views.story(run, member, after, limit)

    async def logs(self, request: Request) -> object:
        run = self._commands.find_readable(_user(request), request.path_params["run"])
        member, after, limit = _page(request)
        return await asyncio.to_thread(logs.page, self._service.directory, run.name, member, after, limit)

    async def stop(self, request: Request) -> object:
        stop = await _body(request, StopRequest, StopRequest())
        return self._commands.stop(self._commands.find_own(_user(request), request.path_params["run"]), stop)

    async def scale(self, request: Request) -> object:
        scale = await _body(request, ScaleRequest)
        return self._commands.scale(self._commands.find_own(_user(request), request.path_params["run"]), scale)

    async def resume(self, request: Request) -> object:
        data = await _read(request)
        scale = _parse(data, ScaleRequest) if data else None
        return self._commands.resume(self._commands.find_own(_user(request), request.path_params["run"]), scale)

    async def agents(self, _request: Request) -> object:
        return self._service.views.agents()

    async def check_machine(self, request: Request) -> object:
        if _user(request) != OWNER:
            raise PermissionDenied("only the coordinator's owner may check its machines")
        return await self.agent_handler.check(request.path_params["agent"], await _body(request, CheckRequest))

    async def pools(self, _request: Request) -> object:
        return self._service.views.pools()

    async def report_setup(self, request: Request) -> object:
        """Take a report of a machine whose agent has not started yet."""
        report = await _body(request, SetupReport)
        self._commands.report_setup(_user(request), request.path_params["allocation"], report)
        return {}

    async def missing_blobs(self, request: Request) -> object:
        """Return those of the given hashes that have to be uploaded."""
        return self.blobs.missing(await _body(request, tuple[str, ...]))

    async def put_blob(self, request: Request) -> object:
        await self.blobs.put(request.path_params["digest"], request.stream())
        return {}

    async def blob(self, request: Request) -> Response:
        digest = request.path_params["digest"]
        try:
            with contextlib.suppress(UnknownBlob):
                return FileResponse(self._environments.path(digest))
            return FileResponse(self.blobs.path(digest))
        except ShoalError as error:
            return _error_response(error)

    async def shutdown(self, _request: Request) -> object:
        self._commands.shut_down("the coordinator was shut down")
        self._shutting_down = asyncio.create_task(self._shut_down_soon())
        return {}

    async def _shut_down_soon(self) -> None:
        """Shut down when the last process has ended, or after ten seconds; the reply to the request is sent first."""
        deadline = asyncio.get_running_loop().time() + SHUT_DOWN_WITHIN_S
        await asyncio.sleep(0.1)
        while self._commands.busy and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        for run in self._service.state.runs:
            self.files.sweep(run, math.inf)
        self._shut_down()

    async def metrics(self, _request: Request) -> Response:
        from shoal.coordinator.http.prometheus import render

        body = render(self._service.views.runs(), self._service.views.agents())
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def member(self, socket: WebSocket) -> None:
        connection = MemberConnection(codec.to_member, _peer(socket), _base_url(socket), socket.scope[SCOPE])  # type: ignore[arg-type]
        handler, decode = self._members, codec.from_member.decode
        await _serve(
            socket,
            connection,
            lambda data: handler.on_message(connection, decode(data)),
            lambda: bool(connection.member),
            lambda: handler.on_close(connection),
        )

    async def agent(self, socket: WebSocket) -> None:
        connection = AgentConnection(codec.to_agent, _peer(socket), _base_url(socket), socket.scope[SCOPE])  # type: ignore[arg-type]
        handler, decode = self.agent_handler, codec.from_agent.decode
        # A member's last message was sent before its process ended, but may be read after the agent reports the exit.
        # So agents are read last.
        await _serve(
            socket,
            connection,
            lambda data: handler.on_message(connection, decode(data)),
            lambda: bool(connection.agent),
            lambda: handler.on_close(connection),
            last=True,
        )


async def _serve(
    socket: WebSocket,
    connection: Connection,
    handle: OnMessage,
    introduced: Callable[[], bool],
    on_close: Callable[[], None],
    *,
    last: bool = False,
) -> None:
    """Accept a WebSocket and pass its messages to `handle` until either side closes it.

    A bad message closes this connection and disturbs no other. A peer that is not `introduced` within ten seconds is
    disconnected. With `last`, its messages are handled after those that have arrived on other connections by now.
    """
    await socket.accept()
    loop = asyncio.get_running_loop()
    deadline = loop.call_later(HELLO_WITHIN_S, lambda: None if introduced() else connection.close())

    def on_message(data: bytes | str) -> None:
        try:
            if not connection.closed:
                handle(data)
        except BadMessage as error:
            connection.reject(error.code, error.what, error.why, error.do)

    def on_message_last(data: bytes | str) -> None:
        loop.call_soon(on_message, data)

    def closed() -> None:
        deadline.cancel()
        on_close()

    connection.socket.listen(on_message_last if last else on_message, closed)


def _peer(socket: WebSocket) -> str:
    return socket.client.host if socket.client is not None else ""


def _base_url(socket: WebSocket) -> str:
    """Return the coordinator's address as this peer knows it."""
    scheme = "https" if socket.url.scheme == "wss" else "http"
    return f"{scheme}://{socket.headers.get('host', socket.url.netloc)}"


def _json(endpoint: Callable[[Request], Awaitable[object]]) -> Endpoint:
    """Wrap an endpoint: encode what it returns as JSON, unless it is a response, and Shoal's errors as error views."""

    async def respond(request: Request) -> Response:
        try:
            result = await endpoint(request)
            if isinstance(result, Response):
                return result
            return Response(msgspec.json.encode(result), media_type="application/json")
        except ShoalError as error:
            return _error_response(error)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)  # to no one: the client closed the connection in mid-request

    return respond


def _error_response(error: ShoalError) -> Response:
    view = ErrorView(error.code, error.what, error.where, error.why, error.do)
    return Response(msgspec.json.encode(view), _status(error), media_type="application/json")


def _status(error: ShoalError) -> int:
    match error:
        case UnknownRun() | UnknownBlob() | UnknownFile():
            return 404
        case UploadCorrupt():
            return 409
        case EventUnstorable():
            return 400
        case StorageError():
            return 507
    return 400


async def _body(request: Request, kind: type[T], default: T | None = None) -> T:
    data = await _read(request)
    return default if default is not None and not data else _parse(data, kind)


async def _read(request: Request) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise BadRequest("the request is too large", why=f"the limit is {MAX_BODY_BYTES} bytes")
    return bytes(data)


def _parse(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except MALFORMED as error:
        raise BadRequest("invalid request body", why=str(error)) from error


def _user(request: Request) -> str:
    """Return the user of the request's token, empty for the coordinator's own."""
    return str(request.scope.get(USER, ""))


def _page(request: Request) -> tuple[str, int, int]:
    """Return the member, position and number of lines that a request asks for."""
    query: Any = request.query_params
    try:
        after, limit = int(query.get("after") or 0), int(query.get("limit") or 1000)
    except ValueError as error:
        raise BadRequest("after and limit must be integers", why=str(error)) from error
    member = query.get("member") or ""
    if abs(after) > MAX_POSITION or len(member) > MAX_NAME:
        raise BadRequest("invalid position in a run", why=f"after {after} of {member[:80]!r}")
    return member, after, max(1, min(limit, MAX_LINES))
