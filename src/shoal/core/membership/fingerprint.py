"""Comparison of fingerprints: how the model or the data of a member differs from those of its run.

A fingerprint is text, a hash or ``key=value;key=value``. A value may be a list, "first, second": then only its first
item that differs is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

# So many sections of a fingerprint are named if they differ.
NAMED_SECTIONS = 3
# These sections describe samples; all others describe the model, its optimizer and how it is trained.
DATA_SECTIONS = ("data", "validation")


@dataclass(frozen=True, slots=True)
class FingerprintDifference:
    """One section in which two fingerprints differ, and the first item of it that does; "" if one side has none."""

    section: str
    in_run: str
    on_member: str

    @property
    def concerns_data(self) -> bool:
        """Whether the samples differ, not the model."""
        return self.section in DATA_SECTIONS


def differences(in_run: str, on_member: str) -> tuple[FingerprintDifference, ...]:
    """Return the first few sections in which the fingerprint of a member differs from that of its run."""
    ours, theirs = _sections(in_run), _sections(on_member)
    keys = [key for key in (ours | theirs) if ours.get(key) != theirs.get(key)]
    return tuple(
        FingerprintDifference(key, *_first_difference(ours.get(key, ""), theirs.get(key, "")))
        for key in keys[:NAMED_SECTIONS]
    )


def describe(differing: Sequence[FingerprintDifference], member: str) -> str:
    """Return the differences of a member as one sentence."""
    shown = [
        f"{each.section}: {each.in_run or 'nothing'} in the run, {each.on_member or 'nothing'} on {member}"
        for each in differing
    ]
    return "; ".join(shown) or "the fingerprints differ"


def _sections(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split(";") if "=" in part)


def _first_difference(expected: str, actual: str) -> tuple[str, str]:
    items = zip_longest(expected.split(", "), actual.split(", "), fillvalue="")
    return next(pair for pair in items if pair[0] != pair[1])
