"""The exception that reports a failed connection between members."""

from __future__ import annotations


class ExchangeBroken(Exception):  # noqa: N818 - an event in the life of a world, not a mistake
    """The connections of a world failed; nothing more can be exchanged in it.

    `suspects` are the members whose connection failed here. It is empty if this member gave up by itself.
    """

    def __init__(self, cause: str, suspects: tuple[str, ...] = ()) -> None:
        super().__init__(cause)
        self.cause = cause
        self.suspects = suspects

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.cause, self.suspects))


class ExchangeDisagreement(ExchangeBroken):
    """Two members began different operations: they do not exchange the same things."""
