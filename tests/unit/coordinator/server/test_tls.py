"""The coordinator's certificate: kept, private, and trusted for the addresses it names."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest

from shoal.coordinator.server import tls
from shoal.errors import StorageError
from shoal.wire import credentials


def test_certificate_is_created_once_and_its_key_is_private(tmp_path: Path) -> None:
    first = tls.ensure(tmp_path, "10.0.0.7")
    assert tls.ensure(tmp_path, "10.0.0.8") == first
    assert stat.S_IMODE((tmp_path / tls.KEY).stat().st_mode) == 0o600
    assert not list(tmp_path.glob("*.part"))


def test_client_that_has_the_certificate_trusts_the_server_and_no_other(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for directory in (mine, other):
        directory.mkdir()
        tls.ensure(directory, "::")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(mine / tls.CERTIFICATE, mine / tls.KEY)
    for directory, trusted in ((mine, True), (other, False)):
        context = credentials.ssl_context(credentials.Credentials("t", (directory / tls.CERTIFICATE).read_text()))
        assert context is not None
        assert _shakes_hands(server, context) is trusted


def _shakes_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> bool:
    near, far = socket.socketpair()
    near.settimeout(30), far.settimeout(30)

    def serve() -> None:
        try:
            server.wrap_socket(far, server_side=True).close()
        except (ssl.SSLError, OSError):
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        client.wrap_socket(near, server_hostname="127.0.0.1").close()
    except ssl.SSLError:
        return False
    finally:
        near.close()
        thread.join()
    return True


def test_directory_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="certificate"):
        tls.ensure(tmp_path / "missing", "::1")
