"""Instructions as messages, and messages as events."""

from __future__ import annotations

import math

from shoal.coordinator.dispatch import event_of, start_member, to_members
from shoal.core.fleet.events import StartProcess
from shoal.core.membership.events import MemberReady, RejectMember, StopMembers
from shoal.core.runs.evaluation import EvaluationReported
from shoal.core.runs.spec import RoleSpec, RunSpec
from shoal.exit_codes import RESUMABLE
from shoal.wire import member_messages as ms


def test_stopped_member_exits_as_done_or_resumable() -> None:
    for of_run, of_member in ((0, 0), (6, RESUMABLE), (130, RESUMABLE)):
        addressed = to_members(StopMembers(("local/0",), "the budget is spent", True, of_run))
        assert addressed == (("local/0",), ms.StopMsg("the budget is spent", True, of_member))


def test_rejection_is_not_addressed_by_name() -> None:
    assert to_members(RejectMember("local/0", "1", "S203", "another model")) is None


def test_process_is_started_with_the_limits_of_its_role() -> None:
    spec = RunSpec("t", ("t.py",), "/", (1, 4), env={"A": "b"}, roles={"trainer": RoleSpec(cpus=2)})
    start = StartProcess("lab", "r", "lab/0", "7", False, "a slot is free")
    message = start_member(start, spec, {"lease_s": 3.0}, "http://c", "/runs/r")
    assert (message.argv, message.env["A"], message.env["SHOAL_CPUS"]) == (("t.py",), "b", "2")
    assert "SHOAL_MEMORY_BYTES" not in message.env
    assert message.env["SHOAL_SETTINGS"] == '{"lease_s":3.0}'


def test_event_of_a_message_leaves_out_metrics_that_are_not_finite() -> None:
    assert event_of("m/0", ms.ReadyMsg("model", 3)) == MemberReady("m/0", "model", 3)
    evaluated = ms.EvaluatedMsg(5, {"loss": math.nan, "accuracy": 0.5})
    assert event_of("m/0", evaluated) == EvaluationReported("m/0", 5, {"accuracy": 0.5})
