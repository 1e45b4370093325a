"""What travels between an agent and its warm process."""

from __future__ import annotations

import socket

import pytest

from shoal.agent.processes.zygote_messages import MAX_ORDER_BYTES, ForkRequest, length_of, pack, receive_start


def order(variables):
    return ForkRequest("k", ("train.py",), False, "/", variables, "log", "why", 1)


def test_an_order_arrives_as_it_was_sent():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack(order({b"A": b"\xff"})))
        found = receive_start(theirs)
        assert found == order({b"A": b"\xff"})
        assert found.env == {"A": "\udcff"}
        ours.sendall(pack(order({}))[:9])
        ours.close()
        assert receive_start(theirs) is None


def test_too_large_an_order_is_refused_on_both_sides():
    with pytest.raises(ValueError, match="too large"):
        pack(order({b"A": b"x" * MAX_ORDER_BYTES}))
    with pytest.raises(ValueError, match="bytes"):
        length_of(b"\xff\xff\xff\xff")
