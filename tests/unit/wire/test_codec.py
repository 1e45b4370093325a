"""Messages as bytes: small ones as they are, large ones packed, and nothing that grows beyond the limit."""

from __future__ import annotations

import zlib

import pytest

from shoal.core.world import Address, Seat, World
from shoal.errors import BadMessage
from shoal.wire import codec
from shoal.wire import member_messages as ms


def form(members: int) -> ms.EnterWorldMsg:
    seats = tuple(
        Seat(f"node-{n:04}/0", f"8f3a12bc-{n}", Address(f"10.0.{n}.7", 30_000 + n), 4e4) for n in range(members)
    )
    return ms.EnterWorldMsg(World(1, seats, 0, fresh=True, sources=dict.fromkeys(range(1, members), 0)), "formed")


def test_a_small_world_is_not_packed() -> None:
    data = codec.to_member.encode(form(4))
    assert not data.startswith(codec.COMPRESSED)
    assert codec.to_member.decode(data) == form(4)


def test_a_large_world_is_packed_and_comes_out_as_it_was() -> None:
    data = codec.to_member.encode(form(1000))
    assert len(data) < 30_000
    assert codec.to_member.decode(data) == form(1000)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (codec.COMPRESSED + zlib.compress(b"x" * (codec.MAX_MESSAGE_BYTES + 1)), "the limit is"),
        (codec.COMPRESSED + zlib.compress(b"x" * 100)[:-6], "its end is missing"),
        (codec.COMPRESSED + b"nonsense", "incorrect header"),
        (codec.COMPRESSED, "its end is missing"),
    ],
    ids=["a bomb", "torn", "not packed at all", "empty"],
)
def test_what_cannot_be_unpacked_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(BadMessage) as refused:
        codec.to_member.decode(data)
    assert why in refused.value.why
