from __future__ import annotations

import pytest

from shoal.core.world import Address, Seat, World

WORLD = World(3, tuple(Seat(name, "1", Address("h", 7)) for name in ("a/0", "b/0", "c/0")), step=10)


def test_rank_is_the_position_of_the_seat() -> None:
    assert WORLD.ranks() == {"a/0": 0, "b/0": 1, "c/0": 2}
    assert [WORLD.rank_of(seat.member) for seat in WORLD.seats] == [0, 1, 2]
    assert WORLD.size == 3


def test_member_without_a_seat_has_no_rank() -> None:
    assert WORLD.rank_of("a") is None
    assert World(4, (), step=None).rank_of("a/0") is None


def test_peers_try_the_main_host_first() -> None:
    assert Address("10.0.0.1", 7, ("192.168.0.1", "::1")).hosts == ("10.0.0.1", "192.168.0.1", "::1")
    assert Address("10.0.0.1", 7).hosts == ("10.0.0.1",)


@pytest.mark.parametrize(("sources", "catching_up"), [({3: 0}, ()), ({0: 3}, ()), ({}, (3,)), ({-1: 0}, ())])
def test_rank_without_a_seat_is_refused(sources: dict[int, int], catching_up: tuple[int, ...]) -> None:
    World(3, WORLD.seats, 10, sources={2: 0}, catching_up=(2,))
    with pytest.raises(ValueError, match="expected an integer from 0 to 2"):
        World(3, WORLD.seats, 10, sources=sources, catching_up=catching_up)
