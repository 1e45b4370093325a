"""Whatever arrives at the port, it is refused with a code, and the others do not notice."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.process.coordinator.fakes import WAIT_S, Coordinator, FakeAgent, FakeMember
from websockets.exceptions import ConnectionClosed, InvalidStatus

import shoal
from shoal.coordinator.http.routes import MAX_BODY_BYTES
from shoal.core.runs.spec import MachineInfo
from shoal.wire import agent_messages
from shoal.wire import member_messages as ms
from shoal.wire.codec import MAX_MESSAGE_BYTES
from shoal.wire.protocol import PROTOCOL, RejectedMsg

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """One for all: whatever a test does to it, the next finds it well."""
    found = Coordinator(tmp_path_factory.mktemp("bad-input") / "c")
    yield found
    found.close()


@pytest.fixture
def trained(coordinator: Coordinator) -> Iterator[tuple[str, FakeMember]]:
    """A run with one member in a world; afterwards it is still there, undisturbed."""
    run = coordinator.create(1, 1, settings={"lease_s": 60.0})
    member = FakeMember(coordinator, run, "m/0").hello().ready()
    member.hear(ms.EnterWorldMsg)
    yield run, member
    member.say(ms.ClaimMsg("still here"))
    assert member.hear(ms.ClaimGrantedMsg).name == "still here"
    view = coordinator.view(run)
    assert (view["world"], view["losses"]) == (1, 0)


def refusal(member: FakeMember) -> str:
    code = member.hear(RejectedMsg).code
    with pytest.raises(ConnectionClosed):
        member.socket.recv(timeout=WAIT_S)
    return code


@pytest.mark.parametrize("path", ["/v1/member", "/v1/agent"])
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": ""}])
def test_wrong_token_opens_no_websocket(coordinator: Coordinator, path: str, headers: dict[str, str]) -> None:
    with pytest.raises(InvalidStatus) as error:
        coordinator.open(path, headers)
    assert error.value.response.status_code == 401
    assert b"S201" in error.value.response.body


def test_wrong_token_reads_and_changes_nothing(coordinator: Coordinator) -> None:
    run = coordinator.create()
    for method, path in [("GET", "/v1/runs"), ("POST", f"/v1/runs/{run}/stop"), ("GET", "/metrics")]:
        status, problem = coordinator.ask(method, path, headers={"Authorization": "Bearer nonsense"})
        assert (status, problem["code"]) == (401, "S201")
    assert coordinator.view(run)["status"] == "starting"
    assert coordinator.ask("GET", "/v1/health", headers={})[0] == 200


def test_request_of_a_foreign_web_page_is_refused(coordinator: Coordinator) -> None:
    good = coordinator.credentials.headers
    assert coordinator.ask("GET", "/v1/runs", headers={**good, "Origin": "http://evil.example"})[0] == 403
    assert coordinator.ask("GET", "/v1/runs", headers={**good, "Host": "evil.example"})[0] == 403


@pytest.mark.parametrize("data", [b"", b"\x00" * 50, b"\x81\xa4type\xa5Hello", os.urandom(500), "text"])
def test_invalid_message_is_refused(
    coordinator: Coordinator, trained: tuple[str, FakeMember], data: bytes | str
) -> None:
    for path in ("/v1/member", "/v1/agent"):
        stranger = FakeMember(coordinator, trained[0], "x/0")
        stranger.socket.close()
        stranger.socket = coordinator.open(path)
        stranger.socket.send(data)
        assert refusal(stranger) == "S208"


def test_oversized_message_closes_the_websocket(coordinator: Coordinator, trained: tuple[str, FakeMember]) -> None:
    stranger = FakeMember(coordinator, trained[0], "x/0")
    stranger.socket.send(b"x" * (MAX_MESSAGE_BYTES + 1))
    with pytest.raises(ConnectionClosed):
        stranger.socket.recv(timeout=WAIT_S)


def test_connection_with_random_bytes_is_closed(coordinator: Coordinator, trained: tuple[str, FakeMember]) -> None:
    address = urlsplit(coordinator.url)
    with socket.create_connection((address.hostname, address.port), timeout=WAIT_S) as bare:
        bare.sendall(os.urandom(4096) + b"\r\n\r\n")
        while bare.recv(4096):
            pass


def test_unauthorised_request_is_read_to_its_end_before_the_reply(coordinator: Coordinator) -> None:
    """It would hear that the line broke otherwise, and not why."""
    address = urlsplit(coordinator.url)
    with socket.create_connection((address.hostname, address.port), timeout=WAIT_S) as bare:
        head = f"POST /v1/runs HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer wrong\r\n"
        bare.sendall(f"{head}Content-Length: 6\r\n\r\n".encode())
        assert not select.select([bare], [], [], 0.5)[0], "it was refused before it had said what it wants"
        for piece in (b'"a', b"b", b'c"\n'):
            bare.sendall(piece)
        assert bare.recv(1 << 16).startswith(b"HTTP/1.1 401")


def test_member_of_another_version_is_refused(coordinator: Coordinator, trained: tuple[str, FakeMember]) -> None:
    assert refusal(FakeMember(coordinator, trained[0], "x/0").hello(version="0.0.1")) == "S202"
    assert refusal(FakeMember(coordinator, trained[0], "x/0").hello(protocol=99)) == "S202"


def test_member_of_an_unknown_run_is_refused(coordinator: Coordinator, trained: tuple[str, FakeMember]) -> None:
    assert refusal(FakeMember(coordinator, "elsewhere", "x/0").hello()) == "S203"


def test_second_member_of_the_same_name_is_refused(coordinator: Coordinator, trained: tuple[str, FakeMember]) -> None:
    assert refusal(FakeMember(coordinator, trained[0], "m/0", "other").hello()) == "S205"


def test_second_process_of_a_member_is_refused(coordinator: Coordinator, trained: tuple[str, FakeMember]) -> None:
    """A fork that joins has the identity of its parent; the two once evicted each other, and both exited with 0."""
    assert refusal(FakeMember(coordinator, trained[0], "m/0").hello(pid=2)) == "S215"


def test_member_with_another_model_is_refused(coordinator: Coordinator, trained: tuple[str, FakeMember]) -> None:
    stranger = FakeMember(coordinator, trained[0], "x/0").hello()
    stranger.hear(ms.WelcomeMsg)
    stranger.say(ms.ReadyMsg("another", None))
    assert refusal(stranger) == "S206"
    view = coordinator.view(trained[0])
    assert view["world"] == 1


def test_connection_without_a_hello_is_refused(coordinator: Coordinator, trained: tuple[str, FakeMember]) -> None:
    stranger = FakeMember(coordinator, trained[0], "x/0")
    stranger.say(ms.WorldBrokenMsg(1, 3, ("m/0",)))
    assert refusal(stranger) == "S208"


def test_agent_name_is_taken_while_it_is_connected(coordinator: Coordinator) -> None:
    FakeAgent(coordinator, "lab").hello()
    second = FakeAgent(coordinator, "lab")
    machine = MachineInfo("lab", 2, 1 << 30)
    second.say(agent_messages.AgentHelloMsg(PROTOCOL, shoal.__version__, "lab", machine, 1, None))
    assert second.hear(RejectedMsg).code == "S205"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "S121"),
        ({"name": "x", "argv": ["a"], "cwd": "/", "members": [0, 1]}, "S112"),
        ({"name": "x", "argv": ["a"], "cwd": "/", "members": [3, 2]}, "S112"),
        ({"name": "x", "argv": [], "cwd": "/", "members": [1, 1]}, "S111"),
        ({"name": "x", "argv": ["a"], "cwd": "/", "members": [1, 1], "surprise": 1}, "S121"),
        ({"name": "x", "argv": ["a"], "cwd": "/", "members": [1, 1], "settings": {"leese_s": 1}}, "S101"),
        ({"name": "x", "argv": ["a"], "cwd": "/", "members": [1, 1], "compat": "mpi"}, "S121"),
    ],
)
def test_bad_request_is_answered_with_an_error(coordinator: Coordinator, body: object, code: str) -> None:
    _, before = coordinator.ask("GET", "/v1/runs")
    status, problem = coordinator.ask("POST", "/v1/runs", body)
    assert (status, problem["code"]) == (400, code)
    assert len(coordinator.ask("GET", "/v1/runs")[1]) == len(before)


@pytest.mark.parametrize(
    ("method", "asked"),
    [
        ("GET", "story?after=" + "9" * 25),
        ("GET", "story?after=-" + "9" * 25),
        ("GET", "story?limit=" + "9" * 5000),
        ("GET", "logs?member=" + "a" * 300),
        ("PUT", "files/outputs/x?upload=0123456789abcdef&offset=" + "9" * 5000),
        ("PUT", f"files/outputs/x?upload=0123456789abcdef&offset=0&digest={'0' * 64}&size=" + "9" * 5000),
    ],
)
def test_number_or_name_out_of_bounds_is_refused(coordinator: Coordinator, method: str, asked: str) -> None:
    run = coordinator.create()
    (coordinator.directory / "runs" / run / "logs").mkdir()
    status, problem = coordinator.ask(method, f"/v1/runs/{run}/{asked}")
    assert (status, problem["code"]) == (400, "S121")


@pytest.mark.parametrize("verb", ["stop", "scale", "resume"])
def test_request_body_over_the_limit_is_refused(coordinator: Coordinator, verb: str) -> None:
    run, address = coordinator.create(), urlsplit(coordinator.url)
    with socket.create_connection((address.hostname, address.port), timeout=WAIT_S) as bare:
        token = coordinator.credentials.headers["Authorization"]
        head = f"POST /v1/runs/{run}/{verb} HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: {token}\r\n"
        bare.sendall(f"{head}Content-Length: {1 << 40}\r\n\r\n".encode())
        bare.sendall(b"x" * (MAX_BODY_BYTES + 1))
        answer = bare.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 400")


def test_unknown_run_is_not_found(coordinator: Coordinator) -> None:
    status, problem = coordinator.ask("GET", "/v1/runs/nothing")
    assert (status, problem["code"]) == (404, "S113")


def end_of(directory: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "shoal.coordinator", "--dir", str(directory), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    return done.returncode, done.stderr


def test_two_coordinators_never_share_a_directory(coordinator: Coordinator) -> None:
    code, said = end_of(coordinator.directory)
    assert code == 4
    assert "error[S522]" in said
    assert coordinator.ask("GET", "/v1/health")[0] == 200


def test_port_in_use_is_reported(coordinator: Coordinator, tmp_path: Path) -> None:
    code, said = end_of(tmp_path / "other", "--port", str(urlsplit(coordinator.url).port))
    assert code == 4
    assert "error[S420]" in said


def test_unwritable_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, said = end_of(tmp_path / "file" / "c")
    assert code == 4
    assert "error[S520]" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir(mode=0o500)
    code, said = end_of(tmp_path / "c")
    assert code == 4
    assert "error[S520]" in said


def test_damaged_journal_is_reported_and_left_alone(tmp_path: Path) -> None:
    found = Coordinator(tmp_path / "c")
    found.create()
    found.close()
    path = tmp_path / "c" / "journal.jsonl"
    lines = path.read_text().splitlines()
    damaged = "\n".join([lines[0][:-3], *lines[1:]]) + "\n"
    path.write_text(damaged)
    code, said = end_of(tmp_path / "c")
    assert code == 4
    assert "error[S521]" in said
    assert "line 1" in said
    assert path.read_text() == damaged


def test_many_wrong_tokens_are_limited_but_the_right_one_still_works(coordinator: Coordinator) -> None:
    statuses = [coordinator.ask("GET", "/v1/runs", headers={"Authorization": "Bearer x"})[0] for _ in range(40)]
    assert statuses[0] == 401
    assert statuses[-1] == 429
    assert coordinator.ask("GET", "/v1/runs")[0] == 200
