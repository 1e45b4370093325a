"""A member's connection to the coordinator, against a real WebSocket server on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.server import Server, ServerConnection, serve

from shoal.testing.wait import until
from shoal.wire import codec
from shoal.wire import member_messages as messages
from shoal.wire.credentials import Credentials
from shoal.wire.protocol import RejectedMsg
from shoal.worker.session.uplink import MemberUplink


class Coordinator:
    """A server that keeps what it receives and the connections it has."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.connections: list[ServerConnection] = []
        self.server: Server = serve(self._handle, "127.0.0.1", 0, process_request=self._check)
        self.status: int | None = None
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.socket.getsockname()[1]}"

    def _check(self, connection: ServerConnection, _request: Any) -> Any:
        return connection.respond(self.status, "") if self.status is not None else None  # type: ignore[arg-type]

    def _handle(self, connection: ServerConnection) -> None:
        self.connections.append(connection)
        for frame in connection:
            self.received.append(codec.from_member.decode(frame))

    def heartbeats(self) -> int:
        return sum(isinstance(message, messages.HeartbeatMsg) for message in self.received)


def _heartbeat() -> messages.HeartbeatMsg:
    return messages.HeartbeatMsg(world=None, step=None, phase="waiting", phase_age_s=0.0)


class Member:
    """The uplink's owner, which says `LeftMsg(7)` as its hello and keeps what it receives."""

    def __init__(self, url: str) -> None:
        self.received: list[Any] = []
        self.failures: list[Exception] = []
        self.uplink = MemberUplink(
            url, Credentials("secret"), self._hello, self._receive, _heartbeat, 0.02, 1.0, self.failures.append
        )

    def _receive(self, message: Any) -> None:
        if isinstance(message, messages.RestoreMsg):
            raise ZeroDivisionError
        self.received.append(message)

    @staticmethod
    def _hello(send: Any, attach: Any) -> None:
        send(messages.LeftMsg(7))
        attach()


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    coordinator = Coordinator()
    yield coordinator
    coordinator.server.shutdown()


@pytest.fixture
def member(coordinator: Coordinator) -> Iterator[Member]:
    member = Member(coordinator.url)
    yield member
    member.uplink.close()


def test_hello_comes_first_then_heartbeats_and_messages_arrive(coordinator: Coordinator, member: Member) -> None:
    assert not member.uplink.send(messages.ClaimMsg("too early"))
    member.uplink.open()
    until(lambda: coordinator.heartbeats() >= 2, "two heartbeats")
    assert coordinator.received[0] == messages.LeftMsg(7)
    assert member.uplink.down_for_s == 0.0
    coordinator.connections[0].send(codec.to_member.encode(messages.EvictedMsg("its lease expired")))
    assert until(lambda: member.received, "the message") == [messages.EvictedMsg("its lease expired")]


def test_lost_connection_is_replaced_and_starts_with_a_hello_again(coordinator: Coordinator, member: Member) -> None:
    member.uplink.open()
    until(lambda: coordinator.connections, "the first connection")
    coordinator.connections[0].close_socket()
    until(lambda: coordinator.received.count(messages.LeftMsg(7)) == 2, "a second hello")


@pytest.mark.parametrize(("status", "code"), [(403, "S201"), (500, "S207")])
def test_refused_connection_is_reported_with_its_code(
    coordinator: Coordinator, member: Member, status: int, code: str
) -> None:
    coordinator.status = status
    member.uplink.open()
    rejected = until(lambda: member.received, "the rejection")[0]
    assert isinstance(rejected, RejectedMsg)
    assert rejected.code == code


def test_lease_is_fresh_after_a_pong_or_while_the_coordinator_is_down(coordinator: Coordinator, member: Member) -> None:
    assert not member.uplink.may_step_alone(3.0)
    member.uplink.open()
    until(lambda: member.uplink.may_step_alone(60.0), "the connection")
    unheard = Member("http://127.0.0.1:1")  # a port that needs root to listen on
    unheard.uplink.open()
    until(lambda: unheard.uplink.may_step_alone(60.0), "a refused connection")
    assert unheard.uplink.down_for_s > 0.0
    unheard.uplink.close()


@pytest.mark.parametrize("frame", [b"\x81\xa4type\xa4\xff\xff\xff\xff", b"\x91" * 3000], ids=["not UTF-8", "nested"])
def test_malformed_message_costs_the_connection_and_not_the_uplink(
    coordinator: Coordinator, member: Member, frame: bytes
) -> None:
    member.uplink.open()
    until(lambda: coordinator.connections, "the first connection")[0].send(frame)
    until(lambda: len(coordinator.connections) == 2, "the second connection")
    assert not member.failures


def test_error_in_a_handler_is_reported_and_not_swallowed(coordinator: Coordinator, member: Member) -> None:
    member.uplink.open()
    restore = codec.to_member.encode(messages.RestoreMsg("no member has the state"))
    until(lambda: coordinator.connections, "the connection")[0].send(restore)
    (failure,) = until(lambda: member.failures, "the failure")
    assert isinstance(failure, ZeroDivisionError)
