"""Every note that is more than routine has a kind, and the digest of `shoal why` knows all of them."""

from __future__ import annotations

from typing import get_args

import pytest

from shoal.cli.output import incidents
from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.note_kinds import NoteKind
from shoal.core.runs import story

KINDS = [kind for kind in get_args(NoteKind) if kind]


@pytest.mark.parametrize("kind", KINDS)
def test_kind_of_a_note_is_the_kind_of_its_line_and_an_incident(kind: NoteKind) -> None:
    event = ev.ProgressRecorded(1)
    notes = [ev.MembershipNote("one", "lab/0", kind, world=2, step=7), fe.FleetNote("r", "two", "lab/0", kind)]
    first, second = story.tell(1, 1.0, "r", event, [("r", note) for note in notes])
    assert (first.kind, first.member, first.world, first.step) == (kind, "lab/0", 2, 7)
    assert (second.kind, second.member) == (kind, "lab/0")
    assert incidents.KINDS[kind] in incidents.DIGEST


def test_note_without_a_kind_is_routine_whatever_its_text() -> None:
    note = ev.MembershipNote("lab/0 is lost: it closed its connection", "lab/0")
    (line,) = story.tell(1, 1.0, "r", ev.ProgressRecorded(1), [("r", note)])
    assert line.kind == "MembershipNote"
    assert incidents.kind_of(line) == incidents.ROUTINE


def test_member_that_is_silent_or_hangs_is_told_apart_from_one_that_ended() -> None:
    assert ev.MemberLost("m", "x").note_kind == "MemberLost"
    assert ev.MemberLost("m", "x", hung=True).note_kind == "MemberHung"
    assert ev.MemberLost("m", "x", silent=True).note_kind == "MemberHung"
