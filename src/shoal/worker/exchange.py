"""How the members of one world sum gradients and share pulses, whoever carries the bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Adder = Callable[[NDArray[Any], NDArray[Any]], object]
"""Adds its second argument to its first, in place; for types that NumPy cannot add."""

OnBreak = Callable[[tuple[str, ...], str], object]
"""Told once, from the exchange's own thread, that the world fell apart: the suspects and the cause."""


class ExchangeBroken(Exception):  # noqa: N818 - it is an event of the world, not a mistake
    """The world of an exchange fell apart; nothing more can be exchanged in it.

    `suspects` are the members whose connection failed here; it is empty if this member gave up by itself.
    """

    def __init__(self, cause: str, suspects: tuple[str, ...] = ()) -> None:
        super().__init__(cause)
        self.cause = cause
        self.suspects = suspects

    def __reduce__(self) -> tuple[object, ...]:
        return (ExchangeBroken, (self.cause, self.suspects))


class Ticket(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when the operation is complete; raise ExchangeBroken if it never will be."""


class GatherTicket(Ticket, Protocol):
    """A gather under way."""

    def result(self) -> NDArray[np.float64]:
        """Wait, then return the records of all ranks, one row a rank."""


class Exchange(Protocol):
    """Collective operations of one world; every rank calls the same ones in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, record: NDArray[np.float64]) -> GatherTicket:
        """Send one small record to all and receive everybody's."""

    def reduce(self, buffer: NDArray[Any], add: Adder | None = None) -> Ticket:
        """Sum a buffer over all ranks in place, bitwise equal on all; leave it alone until the ticket is done."""

    def barrier(self) -> None:
        """Return when every rank has come here."""

    def abort(self, cause: str) -> None:
        """Fail every operation, pending and future, at once; callable from any thread, any number of times."""

    def close(self) -> None:
        """Let go of threads and connections."""
