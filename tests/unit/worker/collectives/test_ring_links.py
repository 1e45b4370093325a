from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from shoal.worker.collectives.ring_links import (
    EAGER_BYTES,
    FAREWELL,
    GATHER,
    HEADER_BYTES,
    REDUCE,
    RingLinks,
    make_header,
)
from shoal.worker.transport.exchange_broken import ExchangeBroken


class Neighbours:
    """The links of one rank, and the far ends of both connections."""

    def __init__(self) -> None:
        following, self.next = socket.socketpair()
        preceding, self.previous = socket.socketpair()
        self.links = RingLinks(3, following, preceding, ("m2", "m0"))


@pytest.fixture
def neighbours() -> Iterator[Neighbours]:
    made = Neighbours()
    yield made
    made.links.close()
    made.next.close()
    made.previous.close()


def test_header_is_equal_only_for_equal_operations(neighbours: Neighbours) -> None:
    ours = make_header(REDUCE, 7, "f4", 400)
    assert len(ours) == HEADER_BYTES
    neighbours.links.compare(ours, memoryview(make_header(REDUCE, 7, "f4", 400)))
    with pytest.raises(ExchangeBroken, match="m0 and this member disagree: it begins operation 8, a gather of 8 bytes"):
        neighbours.links.compare(ours, memoryview(make_header(GATHER, 8, "f8", 8)))
    with pytest.raises(ExchangeBroken, match="bytes that are no operation"):
        neighbours.links.compare(ours, memoryview(bytes(HEADER_BYTES)))
    with pytest.raises(ExchangeBroken, match="m0 left the ring"):
        neighbours.links.compare(ours, memoryview(make_header(FAREWELL, 0, "", 0)))


def test_large_operation_waits_for_the_credit_of_the_next_rank(neighbours: Neighbours) -> None:
    links = neighbours.links
    assert not links.begin(EAGER_BYTES)
    assert links.begin(EAGER_BYTES + 1)
    assert neighbours.previous.recv(1) == b"\x01"
    assert links.lacks_credit(EAGER_BYTES)
    neighbours.next.send(b"\x01")
    assert not links.lacks_credit(EAGER_BYTES)
    assert links.lacks_credit(EAGER_BYTES)


def test_neighbour_that_closes_without_a_farewell_is_suspected(neighbours: Neighbours) -> None:
    neighbours.previous.close()
    with pytest.raises(ExchangeBroken, match="lost m0: it closed the connection") as broken:
        neighbours.links.rest()
    assert broken.value.suspects == ("m0",)


def test_neighbour_that_says_farewell_is_not_suspected(neighbours: Neighbours) -> None:
    neighbours.next.send(b"\xff")
    neighbours.next.close()
    with pytest.raises(ExchangeBroken, match="m2 left the ring") as broken:
        neighbours.links.rest()
    assert broken.value.suspects == ()


def test_stopped_links_say_farewell_in_both_directions(neighbours: Neighbours) -> None:
    neighbours.links.stop("it ends")
    assert neighbours.previous.recv(64) == b"\xff"
    assert neighbours.next.recv(64) == make_header(FAREWELL, 0, "", 0)
    with pytest.raises(ExchangeBroken, match="it ends"):
        neighbours.links.check()
