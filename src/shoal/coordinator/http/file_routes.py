"""File routes: members upload and download files of their runs, users download those of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse

from shoal.coordinator.http.auth import USER
from shoal.coordinator.storage.run_files import MAX_CHUNK_BYTES, RunFiles, parse_expected, parse_size
from shoal.errors import BadRequest, PermissionDenied

FILES = "/v1/runs/{run}/files"
FILE = FILES + "/{name:path}"

Endpoint = Callable[[Request], Awaitable[object]]


class FileRoutes:
    """Endpoints for the files of runs. `run_of` returns the id of the run that a user means and may use."""

    def __init__(self, files: RunFiles, run_of: Callable[[str, str], str]) -> None:
        self._files, self._run_of = files, run_of

    def endpoints(self) -> list[tuple[str, str, Endpoint]]:
        """Return path, method and handler of each endpoint."""
        return [
            (FILES, "GET", self.page),
            (FILE, "GET", self.file),
            (FILE, "PUT", self.upload),
            (FILE, "DELETE", self.delete),
        ]

    async def page(self, request: Request) -> object:
        query = request.query_params
        folder, prefix = query.get("folder", ""), query.get("prefix", "")
        return await asyncio.to_thread(self._files.page, self._run(request), folder, prefix)

    async def file(self, request: Request) -> object:
        """Return a file, or the requested range of it."""
        path = await asyncio.to_thread(self._files.path, self._run(request), request.path_params["name"])
        return FileResponse(path, media_type="application/octet-stream")

    async def upload(self, request: Request) -> object:
        """Store one chunk of a file; the disk is used in another thread."""
        run, query = self._member_run(request), request.query_params
        offset = parse_size(query.get("offset", ""))
        if offset is None:
            raise BadRequest("invalid offset of a chunk", why=repr(query.get("offset", "")[:20]))
        expected = parse_expected(query.get("size", ""), query["digest"]) if "digest" in query else None
        chunk, upload, name = await _read_chunk(request), query.get("upload", ""), request.path_params["name"]
        await asyncio.to_thread(self._files.put, run, name, upload, offset, chunk, expected)
        return {}

    async def delete(self, request: Request) -> object:
        """Delete a file, or abort an upload."""
        run, upload = self._member_run(request), request.query_params.get("upload")
        if upload is not None:
            await asyncio.to_thread(self._files.abort, run, upload)
        else:
            await asyncio.to_thread(self._files.delete, run, request.path_params["name"])
        return {}

    def _run(self, request: Request) -> str:
        return self._run_of(_user(request), request.path_params["run"])

    def _member_run(self, request: Request) -> str:
        """Return the run of a request that writes; only members write, and they have the coordinator's own token."""
        if user := _user(request):
            raise PermissionDenied(f"user {user} may not write files of runs", why="only their members do")
        return self._run(request)


def _user(request: Request) -> str:
    return str(request.scope.get(USER, ""))


async def _read_chunk(request: Request) -> bytes:
    chunk = bytearray()
    try:
        async for data in request.stream():
            chunk += data
            if len(chunk) > MAX_CHUNK_BYTES:
                raise BadRequest("the chunk is too large", why=f"the limit is {MAX_CHUNK_BYTES} bytes")
    except ClientDisconnect as error:
        raise BadRequest("client disconnected during the upload") from error
    return bytes(chunk)
