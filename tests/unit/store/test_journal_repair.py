"""A damaged journal can be stepped past, and says what is missing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shoal.coordinator.rebuild_views import repair
from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.runs.events import KINDS, RunCreated
from shoal.core.runs.spec import RunSpec
from shoal.errors import JournalDamaged, JournalLocked
from shoal.store import journal
from shoal.store.journal import Journal

EVENTS = [("", fe.CoordinatorStarted("s")), ("r", RunCreated(RunSpec("t", ("t.py",), "/", (1, 1)), {}))] + [
    ("r", ev.ScaleRequested(1, number)) for number in range(1, 5)
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    opened = Journal(tmp_path)
    for run, event in EVENTS:
        opened.append(run, event, 5.0)
    opened.close()
    return opened.path


def kinds(path: Path) -> list[str]:
    entries = list(journal.read(path.parent))
    for entry in entries:
        journal.decode_event(entry, KINDS)
    return [entry.kind for entry in entries]


def test_whole_journal_is_left_alone(path: Path) -> None:
    before = path.read_bytes()
    assert repair(path.parent) == []
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.damaged"))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (b"nonsense\n", "JSON"),
        (
            b'{"seq":3,"at":5.0,"run":"r","kind":"ScaleRequested","fields":{"min_members":null,"max_members":1}}\n',
            "int",
        ),
        (b'{"seq":3,"at":5.0,"run":"r","kind":"Unheard","fields":{}}\n', "Unheard"),
        (b'{"seq":3,"at":5.0,"run":"\xff","kind":"ScaleRequested","fields":{}}\n', "utf-8"),
    ],
)
def test_unreadable_event_is_replaced_by_one_that_says_so(path: Path, damage: bytes, why: str) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = b"".join([*lines[:2], damage, *lines[3:]])
    path.write_bytes(damaged)
    (skipped,) = repair(path.parent)
    assert (skipped.line, skipped.seq) == (3, 3)
    assert why in skipped.why
    assert kinds(path)[2] == "EventSkipped"
    assert kinds(path).count("ScaleRequested") == 3
    assert path.with_name("journal.jsonl.damaged").read_bytes() == damaged
    opened = Journal(path.parent)
    assert opened.seq == len(EVENTS)
    opened.close()


def test_missing_and_repeated_lines_are_named(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[4], lines[4], lines[5]]))
    skipped = repair(path.parent)
    assert [(line.seq, line.why) for line in skipped] == [
        (3, "the line is missing"),
        (4, "the line is missing"),
        (5, "an event of this number came before"),
    ]
    assert [entry.seq for entry in journal.read(path.parent)] == [1, 2, 3, 4, 5, 6]


def test_damaged_snapshot_is_replaced_by_an_empty_state(path: Path) -> None:
    opened = Journal(path.parent)
    position = opened.position()
    opened.write_snapshot(position, b"")
    opened.drop_before(position)
    opened.append("r", ev.ScaleRequested(1, 9), 6.0)
    opened.close()
    (path.parent / journal.SNAPSHOT_FILE).write_bytes(b"nonsense")
    (skipped,) = repair(path.parent)
    assert skipped.seq == len(EVENTS)
    assert [entry.seq for entry in journal.read(path.parent)] == [7]
    assert repair(path.parent) == []


def test_live_coordinator_is_not_disturbed(path: Path) -> None:
    opened = Journal(path.parent)
    with pytest.raises(JournalLocked):
        repair(path.parent)
    opened.close()


def test_any_damage_can_be_stepped_past(path: Path) -> None:
    """With bytes overwritten, lines lost and lines swapped, the repaired journal always starts."""
    whole = path.read_bytes()
    for seed in range(60):
        generator = random.Random(seed)
        data = bytearray(whole)
        for _ in range(generator.randrange(1, 12)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        lines = bytes(data).splitlines(keepends=True)
        if seed % 3 == 0:
            generator.shuffle(lines)
        path.write_bytes(b"".join(lines[generator.randrange(2) :]))
        try:
            repair(path.parent)
        except JournalDamaged:
            pytest.fail(f"seed {seed}")
        opened = Journal(path.parent)
        for entry in opened.entries():
            journal.decode_event(entry, KINDS)
        opened.close()
