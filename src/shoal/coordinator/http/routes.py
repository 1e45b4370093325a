"""The coordinator's one port: an HTTP API for people and tools, WebSockets for members and agents."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
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
from shoal.coordinator.server.websocket import SCOPE, Hear
from shoal.coordinator.service import CoordinatorService
from shoal.coordinator.storage import blobs, logs
from shoal.coordinator.storage.blobs import FOLDER, STOWED, Blobs
from shoal.coordinator.storage.run_files import RunFiles, sweep_every
from shoal.errors import (
    BadMessage,
    BadRequest,
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
from shoal.wire.protocol import PROTOCOL

HELLO_WITHIN_S = 10.0
SHUT_DOWN_WITHIN_S = 10.0
MAX_BODY_BYTES = 1 << 20
MAX_LINES = 10_000
MAX_POSITION = 1 << 62
SWEEP_S = 60.0
SWEEP_BLOBS_S = 3600.0

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]
Gone = Callable[[], None]


class ApiRoutes:
    """The endpoints around one service."""

    def __init__(self, service: CoordinatorService, leave: Callable[[], None]) -> None:
        self._service = service
        self._members = MemberHandler(service)
        self._agents = AgentHandler(service)
        self._requests = RunCommands(service)
        self._blobs, self._stowed = Blobs(service.directory / FOLDER), Blobs(service.directory / STOWED)
        service.at_every_tick(blobs.sweep_every(self._blobs, service.runs.projects, SWEEP_BLOBS_S))
        self._files = RunFiles(service.run_dir)
        self._filing = FileRoutes(self._files, lambda user, run: self._requests.of(user, run).name)
        service.at_every_tick(sweep_every(self._files, lambda: list(service.runs.runs), SWEEP_S))
        self._leave = leave
        self._leaving: asyncio.Task[None] | None = None

    def routes(self) -> list[Route | WebSocketRoute]:
        return [
            Route("/v1/health", _answering(self.health)),
            Route("/v1/runs", _answering(self.runs)),
            Route("/v1/runs", _answering(self.create), methods=["POST"]),
            Route("/v1/runs/{run}", _answering(self.run)),
            Route("/v1/runs/{run}/story", _answering(self.story)),
            Route("/v1/runs/{run}/logs", _answering(self.logs)),
            Route("/v1/runs/{run}/stop", _answering(self.stop), methods=["POST"]),
            Route("/v1/runs/{run}/scale", _answering(self.scale), methods=["POST"]),
            Route("/v1/runs/{run}/resume", _answering(self.resume), methods=["POST"]),
            *(Route(path, _answering(one), methods=[how]) for path, how, one in self._filing.endpoints()),
            Route("/v1/agents", _answering(self.agents)),
            Route("/v1/agents/{agent}/examine", _answering(self.examine), methods=["POST"]),
            Route("/v1/pools", _answering(self.pools)),
            Route("/v1/hires/{hire}", _answering(self.hire), methods=["POST"]),
            Route("/v1/blobs", _answering(self.missing), methods=["POST"]),
            Route("/v1/blobs/{digest}", _answering(self.keep), methods=["PUT"]),
            Route("/v1/blobs/{digest}", self.blob),
            Route("/v1/shutdown", _answering(self.shutdown), methods=["POST"]),
            Route("/metrics", self.metrics),
            WebSocketRoute("/v1/member", self.member),
            WebSocketRoute("/v1/agent", self.agent),
        ]

    async def health(self, _request: Request) -> object:
        return Health(shoal.__version__, PROTOCOL, self._service.name)

    async def runs(self, _request: Request) -> object:
        return self._service.run_views()

    async def create(self, request: Request) -> object:
        return self._requests.create((await _body(request, SubmitRequest)).spec(), _user(request))

    async def run(self, request: Request) -> object:
        return self._service.view(self._requests.find(request.path_params["run"]).name)

    async def story(self, request: Request) -> object:
        run = self._requests.find(request.path_params["run"])
        member, after, limit = _page(request)
        return await self._service.story(run, member, after, limit)

    async def logs(self, request: Request) -> object:
        run = self._requests.find(request.path_params["run"])
        member, after, limit = _page(request)
        return await asyncio.to_thread(logs.page, self._service.directory, run.name, member, after, limit)

    async def stop(self, request: Request) -> object:
        ask = await _body(request, StopRequest, StopRequest())
        return self._requests.stop(self._requests.of(_user(request), request.path_params["run"]), ask)

    async def scale(self, request: Request) -> object:
        ask = await _body(request, ScaleRequest)
        return self._requests.scale(self._requests.of(_user(request), request.path_params["run"]), ask)

    async def resume(self, request: Request) -> object:
        data = await _read(request)
        ask = _parsed(data, ScaleRequest) if data else None
        return self._requests.resume(self._requests.of(_user(request), request.path_params["run"]), ask)

    async def agents(self, _request: Request) -> object:
        return self._service.agent_views()

    async def examine(self, request: Request) -> object:
        if _user(request) != OWNER:
            raise PermissionDenied("only the coordinator's owner may examine its machines")
        return await self._agents.examine(request.path_params["agent"], await _body(request, CheckRequest))

    async def pools(self, _request: Request) -> object:
        return self._service.pool_views()

    async def hire(self, request: Request) -> object:
        """What a machine says of itself before its agent is there."""
        self._requests.heard(_user(request), request.path_params["hire"], await _body(request, SetupReport))
        return {}

    async def missing(self, request: Request) -> object:
        """Which of these hashes are not here yet."""
        return self._blobs.missing(await _body(request, tuple[str, ...]))

    async def keep(self, request: Request) -> object:
        await self._blobs.put(request.path_params["digest"], request.stream())
        return {}

    async def blob(self, request: Request) -> Response:
        digest = request.path_params["digest"]
        try:
            with contextlib.suppress(UnknownBlob):
                return FileResponse(self._stowed.path(digest))
            return FileResponse(self._blobs.path(digest))
        except ShoalError as error:
            return _problem(error)

    async def shutdown(self, _request: Request) -> object:
        self._requests.shut_down("the coordinator is shut down")
        self._leaving = asyncio.create_task(self._leave_soon())
        return {}

    async def _leave_soon(self) -> None:
        """When the last run has ended, or has taken too long; the answer to the request is sent first."""
        deadline = asyncio.get_running_loop().time() + SHUT_DOWN_WITHIN_S
        await asyncio.sleep(0.1)
        while self._requests.busy and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        for run in self._service.runs.runs:
            self._files.sweep(run, math.inf)
        self._leave()

    async def metrics(self, _request: Request) -> Response:
        from shoal.coordinator.http.prometheus import render

        body = render(self._service.run_views(), self._service.agent_views())
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def member(self, socket: WebSocket) -> None:
        link = MemberConnection(codec.to_member, _peer(socket), _base_url(socket), socket.scope[SCOPE])  # type: ignore[arg-type]
        members, decode = self._members, codec.from_member.decode
        take, gone = lambda data: members.said(link, decode(data)), lambda: members.gone(link)
        await _converse(socket, link, take, lambda: bool(link.member), gone)

    async def agent(self, socket: WebSocket) -> None:
        link = AgentConnection(codec.to_agent, _peer(socket), _base_url(socket), socket.scope[SCOPE])  # type: ignore[arg-type]
        agents, decode = self._agents, codec.from_agent.decode
        take, gone = lambda data: agents.said(link, decode(data)), lambda: agents.gone(link)
        # What a member said before its process ended was sent before, but may be read after: members are heard first.
        await _converse(socket, link, take, lambda: bool(link.agent), gone, last=True)


def make_app(service: CoordinatorService, leave: Callable[[], None]) -> Starlette:
    return Starlette(routes=ApiRoutes(service, leave).routes())


async def _converse(
    socket: WebSocket, link: Connection, take: Hear, known: Callable[[], bool], gone: Gone, *, last: bool = False
) -> None:
    """Let a connection be heard until either side closes it; nothing that is read there can disturb anybody else.

    `last` has it heard after all others on which something has come by now.
    """
    await socket.accept()
    loop = asyncio.get_running_loop()
    late = loop.call_later(HELLO_WITHIN_S, lambda: None if known() else link.close())

    def hear(data: bytes | str) -> None:
        try:
            if not link.closed:
                take(data)
        except BadMessage as error:
            link.refuse(error.code, error.what, error.why, error.do)

    def over() -> None:
        late.cancel()
        gone()

    def hear_last(data: bytes | str) -> None:
        loop.call_soon(hear, data)

    link.socket.listen(hear_last if last else hear, over)


def _peer(socket: WebSocket) -> str:
    return socket.client.host if socket.client is not None else ""


def _base_url(socket: WebSocket) -> str:
    """The coordinator's address as this peer knows it."""
    scheme = "https" if socket.url.scheme == "wss" else "http"
    return f"{scheme}://{socket.headers.get('host', socket.url.netloc)}"


def _answering(endpoint: Callable[[Request], Awaitable[object]]) -> Endpoint:
    """Turns what an endpoint returns into JSON, unless it is an answer, and Shoal's errors into problems."""

    async def answer(request: Request) -> Response:
        try:
            found = await endpoint(request)
            if isinstance(found, Response):
                return found
            return Response(msgspec.json.encode(found), media_type="application/json")
        except ShoalError as error:
            return _problem(error)

    return answer


def _problem(error: ShoalError) -> Response:
    problem = ErrorView(error.code, error.what, error.where, error.why, error.do)
    return Response(msgspec.json.encode(problem), _status(error), media_type="application/json")


def _status(error: ShoalError) -> int:
    match error:
        case UnknownRun() | UnknownBlob() | UnknownFile():
            return 404
        case UploadCorrupt():
            return 409
        case StorageError():
            return 507
    return 400


async def _body(request: Request, kind: type[T], default: T | None = None) -> T:
    data = await _read(request)
    return default if default is not None and not data else _parsed(data, kind)


async def _read(request: Request) -> bytes:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise BadRequest("the request is too large", why=f"the limit is {MAX_BODY_BYTES} bytes")
    return bytes(data)


def _parsed(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise BadRequest("the request cannot be understood", why=str(error)) from error


def _user(request: Request) -> str:
    """Whose token the request came with; empty for the coordinator's own."""
    return str(request.scope.get(USER, ""))


def _page(request: Request) -> tuple[str, int, int]:
    query: Any = request.query_params
    try:
        after, limit = int(query.get("after") or 0), int(query.get("limit") or 1000)
    except ValueError as error:
        raise BadRequest("after and limit are numbers", why=str(error)) from error
    member = query.get("member") or ""
    if abs(after) > MAX_POSITION or len(member) > MAX_NAME:
        raise BadRequest("there is no such place in a run", why=f"after {after} of {member[:80]!r}")
    return member, after, max(1, min(limit, MAX_LINES))
