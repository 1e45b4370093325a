"""Kinds of notes: what a sentence of the story is about, for readers that must not parse its text.

A note is a decision's remark on what has happened, with nothing to carry out. Its kind becomes the kind of its line in
the story; a note without one is routine.
"""

from __future__ import annotations

from typing import Literal

NoteKind = Literal[
    "",
    "AgentLost",
    "CheckpointRestored",
    "CoordinatorRestarted",
    "GroupRestarted",
    "MemberGivenUp",
    "MemberHung",
    "MemberLeaving",
    "MemberLeft",
    "MemberLost",
    "RunScaled",
    "TrainingStartedOver",
    "WorldEntered",
]
