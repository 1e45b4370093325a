"""How closely the members of a run keep together: the setting ``sync``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal.errors import BadSync


@dataclass(frozen=True, slots=True)
class SyncMode:
    """`served` says that servers hold the parameters; `bound` is how far one may be ahead, None for as far as it gets.

    `local` is how many global batches members train for themselves between two exchanges, 0 if they do not.

    >>> parse("stale:4")
    Sync(text='stale:4', served=True, bound=4, local=0)
    """

    text: str
    served: bool
    bound: int | None = None
    local: int = 0


def parse(text: str) -> SyncMode:
    """A mode from a setting: ``step``, ``stale:K``, ``async`` or ``local:H``."""
    if text == "step":
        return SyncMode(text, served=False)
    if text == "async":
        return SyncMode(text, served=True)
    found = re.fullmatch(r"(stale|local):(\d+)", text, re.ASCII)
    if found and found[1] == "stale":
        return SyncMode(text, served=True, bound=int(found[2]))
    if found and int(found[2]):
        return SyncMode(text, served=False, local=int(found[2]))
    raise BadSync(
        f"{text!r} is no way to keep members together",
        why="it is step, async, stale:K with a whole number K of 0 or more, or local:H with one of 1 or more",
        do="for example --sync stale:4 or --sync local:16",
    )
