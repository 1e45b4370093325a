"""How closely the members of a run keep together: the setting ``sync``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal.errors import BadSync


@dataclass(frozen=True, slots=True)
class Sync:
    """`served` says that servers hold the parameters; `bound` is how far one may be ahead, None for as far as it gets.

    >>> parse("stale:4")
    Sync(text='stale:4', served=True, bound=4)
    """

    text: str
    served: bool
    bound: int | None = None


def parse(text: str) -> Sync:
    """A mode from a setting: ``step``, ``stale:K`` or ``async``."""
    if text == "step":
        return Sync(text, served=False)
    if text == "async":
        return Sync(text, served=True)
    found = re.fullmatch(r"stale:(\d+)", text)
    if found:
        return Sync(text, served=True, bound=int(found[1]))
    raise BadSync(
        f"{text!r} is no way to keep members together",
        why="it is step, async, or stale:K with a whole number K that is not negative",
        do="for example --sync stale:4",
    )
