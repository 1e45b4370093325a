"""Several ways side by side, and the first that leads where it should."""

from __future__ import annotations

import asyncio

import pytest

from shoal.agent import paths


class Doors:
    """Ways that open, fail, or never answer; what was opened, and closed again."""

    def __init__(self, **ways: object) -> None:
        self._ways = ways
        self.begun: list[str] = []
        self.closed: list[str] = []

    async def open(self, way: str) -> str:
        self.begun.append(way)
        what = self._ways[way]
        if isinstance(what, Exception):
            raise what
        if what == "late":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return way
        if what is None:
            await asyncio.Event().wait()
        return way

    async def close(self, way: str) -> None:
        self.closed.append(way)

    def first(self) -> tuple[str, str]:
        return asyncio.run(paths.first(tuple(self._ways), self.open, self.close, stagger_s=0.001))


def test_if_the_first_answers_no_other_is_tried():
    doors = Doors(a="open", b="open")
    assert doors.first() == ("a", "a")
    assert doors.begun == ["a"]


def test_one_that_does_not_answer_holds_nobody_up():
    doors = Doors(a=None, b=ConnectionRefusedError(), c="open")
    assert doors.first()[0] == "c"
    assert doors.begun == ["a", "b", "c"]


def test_one_that_opens_too_late_is_closed_again():
    doors = Doors(a="late", b="open")
    assert doors.first()[0] == "b"
    assert doors.closed == ["a"]


def test_if_all_fail_each_says_why():
    refused, unknown = ConnectionRefusedError("no"), OSError("what")
    with pytest.raises(paths.NoneAnswered) as none:
        Doors(a=refused, b=unknown).first()
    assert none.value.failures == {"a": refused, "b": unknown}
