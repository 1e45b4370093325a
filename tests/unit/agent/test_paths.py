"""Several ways side by side, and the first that leads where it should."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shoal.agent import happy_eyeballs


class Doors:
    """Ways that open, fail, or never answer; what was opened, and closed again."""

    def __init__(self, **ways: object) -> None:
        self._ways = ways
        self.begun: list[str] = []
        self.closed: list[str] = []

    async def open(self, way: str, answered: Callable[[], None]) -> str:
        self.begun.append(way)
        what = self._ways[way]
        if what in ("slow", "mute"):
            answered()
        if what == "slow":
            # So many turns that another would have been begun long since.
            for _ in range(200):
                await asyncio.sleep(0)
        if isinstance(what, Exception):
            raise what
        if what == "late":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return way
        if what in (None, "mute"):
            await asyncio.Event().wait()
        return way

    async def close(self, way: str) -> None:
        self.closed.append(way)

    def first(self, stagger_s: float = 0.001, proof_s: float = 60.0) -> tuple[str, str]:
        return asyncio.run(happy_eyeballs.first(tuple(self._ways), self.open, self.close, stagger_s, proof_s))


def test_if_the_first_answers_no_other_is_tried():
    doors = Doors(a="open", b="open")
    assert doors.first() == ("a", "a")
    assert doors.begun == ["a"]


def test_one_that_does_not_answer_holds_nobody_up():
    doors = Doors(a=None, b=ConnectionRefusedError(), c="open")
    assert doors.first()[0] == "c"
    assert doors.begun == ["a", "b", "c"]


def test_one_that_answers_has_time_to_prove_itself():
    doors = Doors(a="slow", b="open")
    assert doors.first(stagger_s=0.0) == ("a", "a")
    assert doors.begun == ["a"]


def test_one_that_answers_and_never_proves_itself_holds_nobody_up():
    assert Doors(a="mute", b="open").first(proof_s=0.001)[0] == "b"


def test_one_that_opens_too_late_is_closed_again():
    doors = Doors(a="late", b="open")
    assert doors.first()[0] == "b"
    assert doors.closed == ["a"]


def test_if_all_fail_each_says_why():
    refused, unknown = ConnectionRefusedError("no"), OSError("what")
    with pytest.raises(happy_eyeballs.NoUrlReachable) as none:
        Doors(a=refused, b=unknown).first()
    assert none.value.failures == {"a": refused, "b": unknown}
