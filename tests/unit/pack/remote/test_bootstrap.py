"""Downloads of the bootstrap, from a real HTTP server on this machine."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from shoal.pack.remote import bootstrap
from shoal.pack.remote.bootstrap import BootstrapClient, DownloadFailed

BLOB = b"wheel" * 1000
DIGEST = hashlib.sha256(BLOB).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers blobs from the server's list of replies, each a status and a body; the last one is repeated."""

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        server.seen.append((self.path, self.headers["Authorization"]))
        status, body = server.replies.pop(0) if len(server.replies) > 1 else server.replies[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


class Server(HTTPServer):
    replies: list[tuple[int, bytes]]
    seen: list[tuple[str, str]]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(bootstrap.time, "sleep", lambda seconds: None)
    server = Server(("127.0.0.1", 0), Handler)
    server.replies, server.seen = [(200, BLOB)], []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def client(server: Server, path: Path, *more: str) -> BootstrapClient:
    (path / "token").write_text("secret\n")
    return BootstrapClient(",".join([*more, f"http://127.0.0.1:{server.server_port}"]), str(path / "token"))


def test_blob_is_downloaded_with_the_token_and_kept_only_if_its_hash_is_right(server: Server, tmp_path: Path) -> None:
    client(server, tmp_path).get(DIGEST, str(tmp_path / "wheel"))
    assert (tmp_path / "wheel").read_bytes() == BLOB
    assert server.seen == [(f"/v1/blobs/{DIGEST}", "Bearer secret")]
    assert bootstrap._is_cached(str(tmp_path / "wheel"), DIGEST)
    assert not bootstrap._is_cached(str(tmp_path / "token"), DIGEST)


def test_damaged_download_is_repeated_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.replies = [(200, b"damaged"), (200, BLOB)]
    client(server, tmp_path).get(DIGEST, str(tmp_path / "wheel"))
    assert len(server.seen) == 2
    server.replies = [(200, b"damaged")]
    with pytest.raises(DownloadFailed, match="SHA-256 mismatch"):
        client(server, tmp_path).get(DIGEST, str(tmp_path / "other"))
    assert len(server.seen) == 2 + bootstrap.TRIES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["token", "wheel"]


def test_error_of_the_server_is_tried_again_and_a_missing_blob_is_not(server: Server, tmp_path: Path) -> None:
    server.replies = [(503, b""), (404, b"")]
    with pytest.raises(DownloadFailed, match="HTTP status 404"):
        client(server, tmp_path).get(DIGEST, str(tmp_path / "wheel"))
    assert len(server.seen) == 2


def test_first_url_that_answers_is_used(server: Server, tmp_path: Path) -> None:
    client(server, tmp_path, "http://127.0.0.1:1").get(DIGEST, str(tmp_path / "wheel"))
    assert (tmp_path / "wheel").exists()


def test_urls_that_do_not_answer_are_named_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    second_failed = threading.Event()

    def refuse(address: tuple[str, int], timeout_s: float) -> socket.socket:
        if address[1] == 1:
            second_failed.wait(timeout_s)
        raise ConnectionRefusedError(f"port {address[1]} is closed")

    def connect(url: str, *rest: Any) -> None:
        try_connect(url, *rest)
        if url.endswith(":2"):
            second_failed.set()

    try_connect = bootstrap._try_connect
    monkeypatch.setattr(bootstrap.socket, "create_connection", refuse)
    monkeypatch.setattr(bootstrap, "_try_connect", connect)
    with pytest.raises(DownloadFailed) as failed:
        bootstrap._first_reachable(["http://lab:1", "http://lab:2"], None)
    assert str(failed.value) == "http://lab:1: port 1 is closed; http://lab:2: port 2 is closed"


def test_token_of_a_coordinator_with_tls_is_not_sent_in_clear(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap.ssl.SSLContext, "load_verify_locations", lambda self, cadata: None)
    (tmp_path / "token").write_text("secret\n-----BEGIN CERTIFICATE-----\n")
    with pytest.raises(DownloadFailed, match="is not encrypted"):
        BootstrapClient(f"http://127.0.0.1:{server.server_port}", str(tmp_path / "token"))
    assert server.seen == []
