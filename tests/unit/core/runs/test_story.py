"""Every event and instruction is worth at most one sentence."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.membership.decide import MembershipSettings, MembershipState, decide
from shoal.core.placement import PartAssignment, Placement
from shoal.core.runs import events as run_events
from shoal.core.runs import story
from shoal.core.runs.spec import MachineInfo
from shoal.core.world import Address, Seat, World
from shoal.wire.api import RunSpec

SILENT = {
    "MemberReady": False,
    "WorldEntered": True,
    "WorldPrepareFailed": True,
    "MemberLost": True,
    "NoticeReceived": True,
    "MemberLeft": True,
    "ClaimRequested": True,
    "ProgressRecorded": True,
    "AdjustmentReported": True,
    "StopRequested": True,
    "ScaleRequested": True,
    "TimerFired": True,
    "CoordinatorRestarted": True,
    "GrantClaim": True,
    "AnnounceClaimCompleted": True,
    "CoordinatorStarted": True,
    "RunRequested": True,
    "MemberUnresponsive": True,
    "MemberResponsive": True,
    "UnmanagedMembersChanged": True,
    "RunScaled": True,
    "RunStopping": True,
    "RunFinished": True,
    "RunInfeasible": True,
    "FleetTimerExpired": True,
    "MachineReported": True,
    "ProgressMeasured": True,
    "EvaluationReported": True,
}
VALUES: dict[str, Any] = {
    "str": "x",
    "int": 3,
    "int | None": 3,
    "float": 1.0,
    "float | None": 1.0,
    "bool": True,
    "dict[str, int]": {"x": 3},
    "Address": Address("h", 1),
    "World": World(2, (Seat("x", "1", Address("h", 1)),), 5),
    "Placement": Placement(
        2, 1, (Seat("x", "1", Address("h", 1)),), (PartAssignment("x"), PartAssignment("x", "y", "z"))
    ),
    "RunSpec": RunSpec("t", ("t.py",), "/", (1, 2)),
    "MachineInfo": MachineInfo("m", 1, 1),
    "restart_policy.RestartLimits": fe.DEFAULT_RESTARTS,
}
KINDS = [
    kind
    for union in (ev.Event, ev.Instruction, fe.Event, fe.Instruction, run_events.RunEvent)
    for kind in union.__args__  # type: ignore[attr-defined]
]


def example(kind: type) -> Any:
    fields = dataclasses.fields(kind)
    return kind(**{f.name: VALUES.get(str(f.type), () if str(f.type).startswith("tuple") else {}) for f in fields})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_has_a_sentence_or_is_silent_on_purpose(kind: type) -> None:
    lines = story.tell(7, 1.0, "r", example(kind), [])
    assert len(lines) == (0 if SILENT.get(kind.__name__) else 1)
    for line in lines:
        assert line.text
        assert (line.seq, line.kind) == (700, kind.__name__)


def test_world_is_told_with_its_members_and_its_reason() -> None:
    world = World(2, (Seat("a/0", "1", Address("h", 1)), Seat("b/0", "1", Address("h", 1))), 17)
    (line,) = story.tell(1, 1.0, "r", ev.TimerFired("regroup"), [("r", ev.FormWorld(world, (), "two of three"))])
    assert line.text == "world 2 started at step 17 with a/0, b/0"
    assert (line.reason, line.world, line.step) == ("two of three", 2, 17)


SHARES = ev.AdjustmentReported("a/0", 12, "shares", {"a/0": 51, "b/0": 13}, "b/0 is slow: 51, 13 instead of 32, 32")


def test_adjustment_is_one_line_of_its_own_kind() -> None:
    (line,) = story.tell(1, 1.0, "r", SHARES, [("r", ev.MembershipNote("anything"))])
    assert line.text == "shares from step 12 on: b/0 is slow: 51, 13 instead of 32, 32"
    assert (line.kind, line.member, line.step, line.reason) == ("SharesDecided", "", 12, SHARES.reason)
    assert story.tell(1, 1.0, "r", SHARES, []) == [], "a repeated report is no news"


def test_memory_limit_is_told_of_its_member() -> None:
    limited = ev.AdjustmentReported("b/0", 7, "memory", {"b/0": 16}, "b/0 ran out of memory with 32 samples at once")
    (line,) = story.tell(1, 1.0, "r", limited, [("r", ev.MembershipNote("anything"))])
    assert (line.kind, line.member) == ("MemoryDecided", "b/0")
    assert line.text == "from step 7 on: b/0 ran out of memory with 32 samples at once"


def test_exception_is_told_with_its_source_line() -> None:
    raised = run_events.ExceptionReported("a/0", "ValueError", "bad", 'Traceback\n  File "t.py", line 3, in f\n    x\n')
    (line,) = story.tell(1, 1.0, "r", raised, [])
    assert (line.text, line.reason) == ("a/0 raised ValueError: bad", 'File "t.py", line 3, in f')


def test_lines_are_numbered_in_journal_order() -> None:
    instructions = [("r", ev.MembershipNote("one")), ("r", ev.MembershipNote("two"))]
    lines = story.tell(3, 1.0, "r", ev.MemberDisconnected("a/0"), instructions) + story.tell(
        4, 1.0, "r", ev.MemberDisconnected("a/0"), []
    )
    assert [line.seq for line in lines] == [300, 301, 302, 400]


def test_repeated_failures_are_told_as_one_line_with_a_count() -> None:
    """After a failure of the exchange `shoal why` once had a thousand lines."""
    state = MembershipState(MembershipSettings(regroup_s=0.0))
    lines: list[str] = []

    def happens(event: ev.Event) -> None:
        nonlocal state
        state, instructions = decide(state, event, 100.0)
        run = cast(Any, SimpleNamespace(membership=state))
        lines.extend(
            f"{line.text} ({line.reason})"
            for line in story.tell(1, 0.0, "r", event, [("r", i) for i in instructions], run)
        )

    happens(ev.MemberConnected("a", "1", Address("h", 1)))
    happens(ev.MemberReady("a", "x", None))
    happens(ev.TimerFired("regroup"))
    for _ in range(100):
        assert state.world is not None
        happens(ev.WorldBroken("a", state.world.number, 0, (), "no device"))
        happens(ev.TimerFired("retry"))
    assert len(lines) < 45
    assert any("after 64 in a row that broke before their first step" in line for line in lines)
