"""What a machine without Shoal fetches from its coordinator: from the right one, and whole or not at all."""

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


class Careless(http.server.BaseHTTPRequestHandler):
    """Gives each of these in turn, and the last from then on."""

    bodies: tuple[bytes, ...] = ()
    asked = 0

    def do_GET(self) -> None:
        body = self.bodies[min(type(self).asked, len(self.bodies) - 1)]
        type(self).asked += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def careless() -> Iterator[str]:
    Careless.asked = 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Careless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def token(tmp_path: Path) -> str:
    (tmp_path / "token").write_text("secret\n")
    return str(tmp_path / "token")


def test_what_arrives_damaged_is_asked_for_again(
    careless: str, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Careless, "bodies", (BLOB[:-1] + b"?", BLOB))
    bootstrap.BootstrapClient(careless, token).get(DIGEST, str(tmp_path / "wheel"))
    assert (tmp_path / "wheel").read_bytes() == BLOB
    assert Careless.asked == 2


def test_what_always_arrives_damaged_is_never_there(
    careless: str, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Careless, "bodies", (b"something else",))
    monkeypatch.setattr(bootstrap.time, "sleep", lambda _s: None)
    with pytest.raises(bootstrap.DownloadFailed, match="arrived damaged"):
        bootstrap.BootstrapClient(careless, token).get(DIGEST, str(tmp_path / "wheel"))
    assert [one.name for one in tmp_path.iterdir()] == ["token"]


def test_of_several_urls_the_first_that_answers_is_taken(
    careless: str, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Careless, "bodies", (BLOB,))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        bootstrap.BootstrapClient(f"{nobody},{careless}", token).get(DIGEST, str(tmp_path / "wheel"))
        assert (tmp_path / "wheel").read_bytes() == BLOB
        with pytest.raises(bootstrap.DownloadFailed, match="refused") as caught:
            bootstrap.BootstrapClient(f"{nobody},{nobody}", token)
        assert str(caught.value).count(nobody) == 2
