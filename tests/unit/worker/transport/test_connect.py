from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from shoal.core.world import Address, Seat
from shoal.worker.transport.connect import ConnectDeadline
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.handshake import CALL
from shoal.worker.transport.peers import Peers

NEVER = threading.Event()


@pytest.fixture
def caller() -> Iterator[Peers]:
    peers = Peers(b"token", "run", "m0", "first", "127.0.0.1")
    yield peers
    peers.close()


def test_deadline_says_what_did_not_happen_and_suspects_whom_it_waits_for() -> None:
    ConnectDeadline(60.0, NEVER).check(("m1",), "m1 did not come")
    with pytest.raises(ExchangeBroken, match="m1 did not come within -1 s") as broken:
        ConnectDeadline(-1.0, NEVER).check(("m1",), "m1 did not come")
    assert broken.value.suspects == ("m1",)


def test_cancelled_wait_suspects_no_member() -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(ExchangeBroken, match="cancelled") as broken:
        ConnectDeadline(60.0, cancelled).check(("m1",), "m1 did not come")
    assert broken.value.suspects == ()


def test_member_whose_process_is_gone_is_named_with_its_address(caller: Peers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(ExchangeBroken, match=f"cannot reach m1 at .*:{port}: connection refused") as broken:
        caller.connect(CALL, 1, Seat("m1", "first", Address("127.0.0.1", port)), 30.0, NEVER)
    assert broken.value.suspects == ("m1",)


def test_process_that_accepts_and_says_nothing_is_given_up_by_name(caller: Peers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        seat = Seat("m1", "first", Address("127.0.0.1", mute.getsockname()[1]))
        with pytest.raises(ExchangeBroken, match="m1 did not answer at") as broken:
            caller.connect(CALL, 1, seat, 0.05, NEVER)
    assert broken.value.suspects == ("m1",)


@pytest.mark.parametrize("host", ["a" * 70 + ".example", "nul\0byte"])
def test_host_name_that_cannot_exist_is_reported_as_a_broken_exchange(caller: Peers, host: str) -> None:
    with pytest.raises(ExchangeBroken, match="cannot reach m1"):
        caller.connect(CALL, 1, Seat("m1", "first", Address(host, 9)), 30.0, NEVER)


def test_name_too_long_for_a_hello_is_reported_as_a_broken_exchange() -> None:
    caller = Peers(b"token", "r" * 9000, "m0", "first", "127.0.0.1")
    with pytest.raises(ExchangeBroken, match="shorten the names"):
        caller.connect(CALL, 1, Seat("m1", "first", caller.address), 30.0, NEVER)
    caller.close()
