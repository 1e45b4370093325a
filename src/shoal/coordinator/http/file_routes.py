"""Files of runs over HTTP: members send and fetch them, users fetch those of their own runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse

from shoal.coordinator.http.auth import USER
from shoal.coordinator.storage.run_files import MAX_PIECE_BYTES, RunFiles, number_of, whole_of
from shoal.errors import BadRequest, PermissionDenied

AT = "/v1/runs/{run}/files"
NAMED = AT + "/{name:path}"

Endpoint = Callable[[Request], Awaitable[object]]


class FileRoutes:
    """The endpoints around the files. `run_of` finds the run that a user may ask for by what it calls it."""

    def __init__(self, files: RunFiles, run_of: Callable[[str, str], str]) -> None:
        self._files, self._run_of = files, run_of

    def endpoints(self) -> list[tuple[str, str, Endpoint]]:
        return [
            (AT, "GET", self.page),
            (NAMED, "GET", self.file),
            (NAMED, "PUT", self.take),
            (NAMED, "DELETE", self.delete),
        ]

    async def page(self, request: Request) -> object:
        query = request.query_params
        folder, prefix = query.get("folder", ""), query.get("prefix", "")
        return await asyncio.to_thread(self._files.page, self._run(request), folder, prefix)

    async def file(self, request: Request) -> object:
        """The file itself, or the range of it that is asked for."""
        path = await asyncio.to_thread(self._files.path, self._run(request), request.path_params["name"])
        return FileResponse(path, media_type="application/octet-stream")

    async def take(self, request: Request) -> object:
        """A piece of a file. One piece at a time is in memory, and no disk is waited for here."""
        run, query = self._writable(request), request.query_params
        offset = number_of(query.get("offset", ""))
        if offset is None:
            raise BadRequest("a piece of a file needs its offset", why=repr(query.get("offset", "")[:20]))
        whole = whole_of(query.get("size", ""), query["digest"]) if "digest" in query else None
        piece, upload, name = await _piece(request), query.get("upload", ""), request.path_params["name"]
        await asyncio.to_thread(self._files.take, run, name, upload, offset, piece, whole)
        return {}

    async def delete(self, request: Request) -> object:
        run, upload = self._writable(request), request.query_params.get("upload")
        if upload is not None:
            await asyncio.to_thread(self._files.give_up, run, upload)
        else:
            await asyncio.to_thread(self._files.delete, run, request.path_params["name"])
        return {}

    def _run(self, request: Request) -> str:
        return self._run_of(_user(request), request.path_params["run"])

    def _writable(self, request: Request) -> str:
        """Only members write, and they have the coordinator's own token."""
        if _user(request):
            raise PermissionDenied(f"{_user(request)} may not write files of runs", why="that is what their members do")
        return self._run(request)


def _user(request: Request) -> str:
    return str(request.scope.get(USER, ""))


async def _piece(request: Request) -> bytes:
    piece = bytearray()
    try:
        async for some in request.stream():
            piece += some
            if len(piece) > MAX_PIECE_BYTES:
                raise BadRequest("a piece of a file is too large", why=f"the limit is {MAX_PIECE_BYTES} bytes")
    except ClientDisconnect as error:
        raise BadRequest("whoever sent a piece of a file is gone") from error
    return bytes(piece)
