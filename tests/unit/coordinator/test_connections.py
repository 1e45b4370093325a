"""Connections: what is sent, and when a peer is disconnected."""

from __future__ import annotations

from tests.unit.coordinator.stage import member_connection, sent

import shoal
from shoal.coordinator.connections import accept_version
from shoal.wire import member_messages as ms
from shoal.wire.protocol import PROTOCOL, RejectedMsg


def test_peer_that_falls_too_far_behind_is_disconnected() -> None:
    connection = member_connection(room=1)
    connection.send(ms.RestoreMsg("first"))
    assert not connection.closed
    connection.send(ms.RestoreMsg("second"))
    assert connection.closed
    assert connection.socket.closed
    connection.send(ms.RestoreMsg("third"))
    assert [message.reason for message in sent(connection)] == ["first", "second"]


def test_rejected_peer_gets_the_error_before_the_connection_closes() -> None:
    connection = member_connection()
    connection.reject("S201", "what", "why", "do")
    assert (sent(connection), connection.closed) == ([RejectedMsg("S201", "what", "why", "do")], True)


def test_only_the_same_version_and_protocol_are_accepted() -> None:
    accepted, newer, other = member_connection(), member_connection(), member_connection()
    assert accept_version(accepted, PROTOCOL, shoal.__version__)
    assert not accept_version(newer, PROTOCOL + 1, shoal.__version__)
    assert not accept_version(other, PROTOCOL, "0.0.0")
    assert (sent(accepted), [m.code for m in sent(newer)], other.closed) == ([], ["S202"], True)
