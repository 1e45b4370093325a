"""The API client: retries, errors and protocol versions; a fake connection takes the place of the network."""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.views import run_view

from shoal import errors
from shoal.launch.api_client import ApiClient, open_client
from shoal.wire.api import ErrorView, Health, StopRequest
from shoal.wire.protocol import PROTOCOL


class FakeConnection:
    """Answers requests from a list of (status, body) or exceptions."""

    def __init__(self, replies: list[tuple[int, object] | Exception]) -> None:
        self.replies, self.requests = replies, list[tuple[str, str]]()

    def request(self, method: str, target: str, body: Any, headers: dict[str, str]) -> None:
        assert headers["Authorization"] == "Bearer secret"
        self.requests.append((method, target))

    def getresponse(self) -> Any:
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        status, body = reply
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return type("Response", (), {"status": status, "read": lambda self: data})()

    def close(self) -> None:
        return


def client_with(*replies: tuple[int, object] | Exception) -> tuple[ApiClient, FakeConnection]:
    client, connection = ApiClient("http://head:1/", "secret"), FakeConnection(list(replies))
    client._connect = lambda: connection  # type: ignore[method-assign, assignment, return-value]
    return client, connection


def test_lost_connection_is_reopened_for_a_read() -> None:
    view = run_view("a/b")
    client, connection = client_with((200, view), http.client.RemoteDisconnected(), (200, view))
    assert client.run("a/b") == client.run("a/b") == view
    assert connection.requests == [("GET", "/v1/runs/a%2Fb")] * 3


def test_write_is_never_repeated() -> None:
    client, connection = client_with((200, run_view()), http.client.RemoteDisconnected(), (200, run_view()))
    client.run("a")
    with pytest.raises(errors.CoordinatorUnreachable):
        client.stop("a", StopRequest())
    assert len(connection.requests) == 2


def test_error_of_the_coordinator_is_raised_with_its_own_class() -> None:
    client, _ = client_with(
        (404, ErrorView(errors.UnknownRun.code, "unknown run a")), (502, b"<html>"), (200, b"<html>")
    )
    with pytest.raises(errors.UnknownRun, match="unknown run a") as raised:
        client.run("a")
    assert raised.value.where == "http://head:1"
    with pytest.raises(errors.MembershipError, match="HTTP status 502"):
        client.run("a")
    with pytest.raises(errors.BadMessage):
        client.run("a")


def test_other_protocol_is_rejected() -> None:
    client, _ = client_with((200, Health("9.9", PROTOCOL, "c")), (200, Health("9.9", PROTOCOL + 1, "c")))
    assert client.check().coordinator == "c"
    with pytest.raises(errors.VersionMismatch):
        client.check()


def test_only_missing_blobs_are_uploaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("b")
    client, connection = client_with((200, ["bb"]), (200, None))
    assert client.send({"aa": b"a", "bb": tmp_path / "file"}) == 1
    assert connection.requests == [("POST", "/v1/blobs"), ("PUT", "/v1/blobs/bb")]


def test_first_url_in_the_list_that_answers_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("secret\n")
    failures = {"http://a:1": OSError("refused"), "http://b:1": None, "http://c:1": None}
    monkeypatch.setattr(ApiClient, "probe", lambda self, timeout_s: failures[self.url])
    assert open_client("http://a:1,http://b:1,http://c:1", str(tmp_path / "token")).url == "http://b:1"
    failures.update(dict.fromkeys(failures, OSError("refused")))
    with pytest.raises(errors.NoCoordinatorAddress):
        open_client("http://a:1,http://b:1", str(tmp_path / "token"))


def test_client_for_another_thread_trusts_the_same_certificate() -> None:
    context = ssl.create_default_context()
    client = ApiClient("https://head:1", "secret", context, timeout_s=3.0)
    other = client.another()
    assert other is not client
    assert (other.url, other.token, other._context, other._timeout_s) == ("https://head:1", "secret", context, 3.0)
