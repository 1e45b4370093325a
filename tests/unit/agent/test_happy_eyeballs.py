"""Several addresses side by side, and the first that works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shoal.agent import happy_eyeballs


class Addresses:
    """Addresses that open, fail, or never answer; records which were tried and closed again."""

    def __init__(self, **behaviours: object) -> None:
        self._behaviours = behaviours
        self.tried: list[str] = []
        self.closed: list[str] = []

    async def open(self, url: str, on_answer: Callable[[], None]) -> str:
        self.tried.append(url)
        behaviour = self._behaviours[url]
        if behaviour in ("slow", "mute"):
            on_answer()
        if behaviour == "slow":
            # Enough iterations for another address to be tried.
            for _ in range(200):
                await asyncio.sleep(0)
        if isinstance(behaviour, Exception):
            raise behaviour
        if behaviour == "late":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return url
        if behaviour in (None, "mute"):
            await asyncio.Event().wait()
        return url

    async def close(self, url: str) -> None:
        self.closed.append(url)

    def first(self, stagger_s: float = 0.001, proof_s: float = 60.0) -> tuple[str, str]:
        return asyncio.run(happy_eyeballs.first(tuple(self._behaviours), self.open, self.close, stagger_s, proof_s))


def test_no_other_address_is_tried_if_the_first_answers():
    addresses = Addresses(a="open", b="open")
    assert addresses.first() == ("a", "a")
    assert addresses.tried == ["a"]


def test_silent_address_does_not_delay_the_next():
    addresses = Addresses(a=None, b=ConnectionRefusedError(), c="open")
    assert addresses.first()[0] == "c"
    assert addresses.tried == ["a", "b", "c"]


def test_address_that_answers_has_time_to_prove_itself():
    addresses = Addresses(a="slow", b="open")
    assert addresses.first(stagger_s=0.0) == ("a", "a")
    assert addresses.tried == ["a"]


def test_address_that_never_proves_itself_does_not_delay_the_next():
    assert Addresses(a="mute", b="open").first(proof_s=0.001)[0] == "b"


def test_connection_that_opens_too_late_is_closed():
    addresses = Addresses(a="late", b="open")
    assert addresses.first()[0] == "b"
    assert addresses.closed == ["a"]


def test_error_has_the_failure_of_each_address():
    refused, unknown = ConnectionRefusedError("no"), OSError("what")
    with pytest.raises(happy_eyeballs.NoUrlReachable) as error:
        Addresses(a=refused, b=unknown).first()
    assert error.value.failures == {"a": refused, "b": unknown}
