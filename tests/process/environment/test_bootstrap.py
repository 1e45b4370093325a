"""Downloads of a machine without Shoal: from the right coordinator, complete or not at all."""

from __future__ import annotations

import hashlib
import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.pack.remote import bootstrap

pytestmark = pytest.mark.process

BLOB = b"a wheel" * 1000
DIGEST = hashlib.sha256(BLOB).hexdigest()


class FaultyServer(http.server.BaseHTTPRequestHandler):
    """Replies with each of `bodies` in turn, and then always with the last."""

    bodies: tuple[bytes, ...] = ()
    requests = 0

    def do_GET(self) -> None:
        body = self.bodies[min(type(self).requests, len(self.bodies) - 1)]
        type(self).requests += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def faulty_url() -> Iterator[str]:
    FaultyServer.requests = 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FaultyServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def token(tmp_path: Path) -> str:
    (tmp_path / "token").write_text("secret\n")
    return str(tmp_path / "token")


def test_corrupt_download_is_repeated(
    faulty_url: str, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FaultyServer, "bodies", (BLOB[:-1] + b"?", BLOB))
    bootstrap.BootstrapClient(faulty_url, token).get(DIGEST, str(tmp_path / "wheel"))
    assert (tmp_path / "wheel").read_bytes() == BLOB
    assert FaultyServer.requests == 2


def test_download_that_is_always_corrupt_fails_without_a_file(
    faulty_url: str, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FaultyServer, "bodies", (b"something else",))
    monkeypatch.setattr(bootstrap.time, "sleep", lambda _s: None)
    with pytest.raises(bootstrap.DownloadFailed, match="SHA-256 mismatch"):
        bootstrap.BootstrapClient(faulty_url, token).get(DIGEST, str(tmp_path / "wheel"))
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


def test_first_reachable_url_is_used(
    faulty_url: str, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FaultyServer, "bodies", (BLOB,))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        unreachable = f"http://127.0.0.1:{closed.getsockname()[1]}"
        bootstrap.BootstrapClient(f"{unreachable},{faulty_url}", token).get(DIGEST, str(tmp_path / "wheel"))
        assert (tmp_path / "wheel").read_bytes() == BLOB
        with pytest.raises(bootstrap.DownloadFailed, match="refused") as caught:
            bootstrap.BootstrapClient(f"{unreachable},{unreachable}", token)
        assert str(caught.value).count(unreachable) == 2
