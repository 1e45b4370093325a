"""Messages between an agent and its zygote."""

from __future__ import annotations

import socket

import pytest

from shoal.agent.processes.zygote_messages import MAX_MESSAGE_BYTES, ForkRequest, length_of, pack, receive_request


def request(variables):
    return ForkRequest("k", ("train.py",), False, "/", variables, "log", "why", 1)


def test_request_arrives_unchanged():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack(request({b"A": b"\xff"})))
        received = receive_request(theirs)
        assert received == request({b"A": b"\xff"})
        assert received.env == {"A": "\udcff"}
        ours.sendall(pack(request({}))[:9])
        ours.close()
        assert receive_request(theirs) is None


def test_oversized_message_is_refused_on_both_sides():
    with pytest.raises(ValueError, match="too large"):
        pack(request({b"A": b"x" * MAX_MESSAGE_BYTES}))
    with pytest.raises(ValueError, match="bytes"):
        length_of(b"\xff\xff\xff\xff")
