"""Counted nouns: every text that a user reads says "1 member" and "2 members"."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """Return the form of a noun that fits a count.

    >>> plural(1, "process"), plural(2, "process"), plural(0, "step")
    ('process', 'processes', 'steps')
    """
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "member"), counted(2, "member")
    ('1 member', '2 members')
    """
    return f"{count} {plural(count, noun)}"


def bounded(low: int, high: int, noun: str) -> str:
    """Return the bounds of a count as users write them, with their noun.

    >>> bounded(1, 4, "member"), bounded(2, 2, "member"), bounded(1, 1, "member")
    ('1:4 members', '2 members', '1 member')
    """
    return counted(low, noun) if low == high else f"{low}:{high} {plural(high, noun)}"


def be(count: int) -> str:
    """Return "is" after a count of one, "are" after others."""
    return "is" if count == 1 else "are"
