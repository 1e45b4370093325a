"""Sync mode: how closely the members of a run keep together, as the setting ``sync`` says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal.errors import BadSync


@dataclass(frozen=True, slots=True)
class SyncMode:
    """How members synchronise.

    `served`: parameter servers hold the state, and trainers take tickets. `bound` is how many tickets a trainer may be
    ahead of the slowest, None for any number. `local` is how many global batches members train by themselves between
    two exchanges, 0 if they exchange every step.

    >>> parse("stale:4")
    SyncMode(text='stale:4', served=True, bound=4, local=0)
    """

    text: str
    served: bool
    bound: int | None = None
    local: int = 0


def parse(text: str) -> SyncMode:
    """Return the mode of a setting: ``step``, ``stale:K``, ``async`` or ``local:H``; raise BadSync for any other."""
    if text == "step":
        return SyncMode(text, served=False)
    if text == "async":
        return SyncMode(text, served=True)
    match = re.fullmatch(r"(stale|local):(\d+)", text, re.ASCII)
    if match and match[1] == "stale":
        return SyncMode(text, served=True, bound=int(match[2]))
    if match and int(match[2]):
        return SyncMode(text, served=False, local=int(match[2]))
    raise BadSync(
        f"unknown sync mode {text!r}",
        why="expected step, async, stale:K (K ≥ 0) or local:H (H ≥ 1)",
        do="for example --sync stale:4 or --sync local:16",
    )
