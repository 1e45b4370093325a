"""File routes: who may read and write which files, over ASGI."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from shoal.coordinator.http.auth import USER
from shoal.coordinator.http.file_routes import FileRoutes
from shoal.coordinator.http.routes import _json
from shoal.coordinator.storage.run_files import RunFiles
from shoal.errors import PermissionDenied
from shoal.testing.asgi_client import AsgiConnection

DATA = b"weights"
WHOLE = f"upload={'a' * 16}&offset=0&size={len(DATA)}&digest={hashlib.sha256(DATA).hexdigest()}"


@pytest.fixture
def app(tmp_path: Path) -> Any:
    def run_of(user: str, run: str) -> str:
        if user not in ("", "ann"):
            raise PermissionDenied("not yours")
        return run

    routes = FileRoutes(RunFiles(lambda run: str(tmp_path / run)), run_of)
    app = Starlette(
        routes=[Route(path, _json(handler), methods=[method]) for path, method, handler in routes.endpoints()]
    )

    async def with_user(scope: Any, receive: Any, send: Any) -> None:
        scope[USER] = dict(scope["headers"]).get(b"user", b"").decode()
        await app(scope, receive, send)

    return with_user


def ask(app: Any, method: str, path: str, body: bytes = b"", user: str = "") -> tuple[int, bytes]:
    connection = AsgiConnection(app)
    connection.request(method, f"/v1/runs/r-1/files{path}", body, {"user": user})
    response = connection.getresponse()
    return response.status, response.read()


def test_uploaded_file_is_listed_and_downloaded(app: Any) -> None:
    assert ask(app, "PUT", f"/outputs/a/model.bin?{WHOLE}", DATA)[0] == 200
    status, page = ask(app, "GET", "?folder=outputs", user="ann")
    assert (status, [file["name"] for file in json.loads(page)["files"]]) == (200, ["a/model.bin"])
    assert ask(app, "GET", "/outputs/a/model.bin", user="ann") == (200, DATA)


def test_user_may_not_write_and_a_stranger_may_not_read(app: Any) -> None:
    ask(app, "PUT", f"/outputs/model.bin?{WHOLE}", DATA)
    assert ask(app, "PUT", f"/outputs/model.bin?{WHOLE}", DATA, user="ann")[0] == 400
    assert ask(app, "DELETE", "/outputs/model.bin", user="ann")[0] == 400
    assert ask(app, "GET", "/outputs/model.bin", user="bob")[0] == 400
    assert ask(app, "GET", "/outputs/model.bin")[0] == 200


@pytest.mark.parametrize("query", ["offset=-1", "offset=x", f"offset={'9' * 30}", "offset=0&digest=x"])
def test_chunk_with_a_bad_place_is_refused(app: Any, query: str) -> None:
    status, body = ask(app, "PUT", f"/outputs/x?upload={'a' * 16}&{query}", b"x")
    assert (status, json.loads(body)["code"][0]) == (400, "S")


def test_delete_removes_a_file_or_aborts_its_upload(app: Any, tmp_path: Path) -> None:
    ask(app, "PUT", f"/outputs/x?{WHOLE}", DATA)
    ask(app, "PUT", f"/outputs/y?upload={'b' * 16}&offset=0", b"part")
    assert list((tmp_path / "r-1" / "uploads").iterdir())
    assert ask(app, "DELETE", f"/outputs/y?upload={'b' * 16}")[0] == 200
    assert ask(app, "DELETE", "/outputs/x")[0] == 200
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
