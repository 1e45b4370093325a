"""Messages of members become events of their runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.coordinator.stage import create_run, member_connection, member_hello, open_service, sent

from shoal.coordinator.member_handler import MemberHandler
from shoal.coordinator.service import CoordinatorService
from shoal.core.fleet import events as fe
from shoal.core.runs.events import UserStopRequested
from shoal.store import journal
from shoal.wire import member_messages as ms
from shoal.wire.protocol import RejectedMsg


@pytest.fixture
def service(tmp_path: Path) -> Iterator[CoordinatorService]:
    service = open_service(tmp_path)
    create_run(service, low=1, high=1)
    yield service
    service.close()


def kinds(service: CoordinatorService) -> list[str]:
    return [entry.kind for entry in journal.read(service.directory)]


def test_hello_is_journaled_before_the_welcome(service: CoordinatorService) -> None:
    connection = member_connection()
    MemberHandler(service).on_message(connection, member_hello())
    assert kinds(service)[-1] == "MemberConnected"
    welcome = sent(connection)[0]
    assert isinstance(welcome, ms.WelcomeMsg)
    assert (welcome.lease_s, welcome.heartbeat_s, welcome.started) == (3.0, 0.5, False)
    assert service.live.run("r-1").connections["local/0"] is connection


def test_member_that_ran_out_of_memory_is_told_what_fitted(service: CoordinatorService) -> None:
    handler, first, again = MemberHandler(service), member_connection(), member_connection()
    handler.on_message(first, member_hello())
    handler.on_message(first, ms.AdjustmentMsg(7, "memory", {"local/0": 8}, "it ran out of memory"))
    handler.on_message(again, member_hello())
    assert (sent(first)[0].micro_batch, sent(again)[0].micro_batch) == (0, 8)
    assert sent(again)[0].min_members == 1


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        ({"run": "r-2"}, "S203"),
        ({"version": "0.0.0"}, "S202"),
        ({"member": "a\nb"}, "S208"),
        ({"member": "x" * 300}, "S208"),
        ({"member": "local/0", "role": "evaluator"}, "S208"),
    ],
)
def test_hello_that_does_not_fit_is_rejected_and_not_journaled(
    service: CoordinatorService, hello: dict[str, Any], code: str
) -> None:
    connection, before = member_connection(), kinds(service)
    MemberHandler(service).on_message(connection, member_hello(**hello))
    (rejected,) = sent(connection)
    assert isinstance(rejected, RejectedMsg)
    assert rejected.code == code
    assert (connection.closed, kinds(service)) == (True, before)


def test_first_message_must_be_a_hello(service: CoordinatorService) -> None:
    connection = member_connection()
    MemberHandler(service).on_message(connection, ms.ReadyMsg("model", None))
    assert [type(message) for message in sent(connection)] == [RejectedMsg]


def test_ready_member_gets_a_world_and_its_heartbeat_renews_the_lease(service: CoordinatorService) -> None:
    handler, connection = MemberHandler(service), member_connection()
    handler.on_message(connection, member_hello())
    handler.on_message(connection, ms.ReadyMsg("model", None))
    entered = [message for message in sent(connection) if isinstance(message, ms.EnterWorldMsg)]
    assert [seat.member for seat in entered[0].world.seats] == ["local/0"]
    before = service.live.run("r-1").leases["local/0"].at
    handler.on_message(connection, ms.HeartbeatMsg(entered[0].world.number, 5, "compute", 0.0, loss=0.5))
    lease = service.live.run("r-1").leases["local/0"]
    assert (lease.step, lease.at >= before) == (5, True)
    assert kinds(service)[-1] == "ProgressRecorded", "the first step is recorded at once"


def test_measurements_are_shown_and_not_journaled(service: CoordinatorService) -> None:
    handler, connection = MemberHandler(service), member_connection()
    handler.on_message(connection, member_hello())
    handler.on_message(connection, ms.ReadyMsg("model", None))
    for step in (5, 6, 7):
        service.live.run("r-1").measured_at = 0.0
        handler.on_message(connection, ms.HeartbeatMsg(1, step, "compute", 0.0, loss=1 / step))
    assert kinds(service).count("ProgressRecorded") == 1
    assert "ProgressMeasured" not in kinds(service)
    assert service.views.run("r-1").step == 7
    handler.on_message(connection, ms.CheckpointWrittenMsg(7, "there", 0, 0.0))
    assert kinds(service)[-2:] == ["ProgressRecorded", "CheckpointWritten"], "a decision knows the latest step"
    assert service.state.runs["r-1"].membership.step == 7


def test_heartbeats_feed_the_forecast(service: CoordinatorService) -> None:
    handler, connection, live = MemberHandler(service), member_connection(), service.live.run("r-1")
    handler.on_message(connection, member_hello())
    handler.on_message(connection, ms.ReadyMsg("model", None))
    assert "not known" in live.forecast.time_left(service.clock.now()).unknown
    handler.on_message(connection, ms.HeartbeatMsg(1, 5, "compute", 0.0, total_steps=100))
    assert live.forecast.time_left(service.clock.now()).unknown == "no step has been measured yet"


def test_last_measurement_of_an_ended_run_is_journaled(service: CoordinatorService) -> None:
    handler, connection = MemberHandler(service), member_connection()
    service.handle("", fe.AgentConnected("local", 2, "h"))
    incarnation = service.state.fleet.processes["r-1", "local/0"].incarnation
    handler.on_message(connection, member_hello(incarnation=incarnation))
    handler.on_message(connection, ms.ReadyMsg("model", None))
    handler.on_message(connection, ms.HeartbeatMsg(1, 5, "compute", 0.0, loss=0.5))
    service.handle("r-1", UserStopRequested("enough", False, 0.0))
    for process in list(service.state.fleet.processes.values()):
        service.handle("r-1", fe.ProcessExited("r-1", process.member, process.incarnation, "asked"))
    assert service.state.runs["r-1"].has_ended
    assert kinds(service).count("ProgressMeasured") == 1
    again = list(journal.read(service.directory))[-1]
    assert (again.kind, again.fields["loss"]) == ("ProgressMeasured", 0.5)


@pytest.mark.parametrize("speed", [float("nan"), float("inf")])
def test_message_that_the_journal_cannot_hold_is_refused_and_changes_nothing(
    service: CoordinatorService, speed: float
) -> None:
    handler, connection = MemberHandler(service), member_connection()
    handler.on_message(connection, member_hello())
    before = kinds(service)
    handler.on_message(connection, ms.ReadyMsg("model", None, speed=speed))
    (refusal,) = [message for message in sent(connection) if isinstance(message, RejectedMsg)]
    assert "speed" in refusal.why
    assert kinds(service) == before
    assert service.state.runs["r-1"].membership.members["local/0"].status == "starting"


def test_member_that_left_is_told_once_that_it_is_out(service: CoordinatorService) -> None:
    handler, connection = MemberHandler(service), member_connection()
    handler.on_message(connection, member_hello())
    handler.on_message(connection, ms.LeftMsg(None))
    for _ in range(2):
        handler.on_message(connection, ms.HeartbeatMsg(None, None, "compute", 0.0))
    assert "local/0" not in service.state.runs["r-1"].membership.members
    assert connection.evicted


def test_closed_connection_is_recorded_unless_the_member_is_back(service: CoordinatorService) -> None:
    handler, first, second = MemberHandler(service), member_connection(), member_connection()
    handler.on_message(first, member_hello())
    handler.on_message(second, member_hello())
    handler.on_close(first)
    assert first.closed
    assert "MemberDisconnected" not in kinds(service)
    handler.on_close(second)
    assert kinds(service)[-1] == "MemberDisconnected"


@pytest.mark.parametrize(("phase", "step"), [("compute", 0), (ms.OUTSIDE_THE_LOOP, 7)])
def test_step_at_which_a_script_left_its_loop_is_journaled_at_once(
    service: CoordinatorService, phase: str, step: int
) -> None:
    """If its process then exits with code 0, training ends for all members at that step."""
    handler, connection = MemberHandler(service), member_connection()
    handler.on_message(connection, member_hello())
    service.live.run("r-1").measured_at = service.clock.now()
    handler.on_message(connection, ms.HeartbeatMsg(1, 9, ms.OUTSIDE_THE_LOOP, 0.0))
    assert service.state.runs["r-1"].membership.step == 0, "it does not train yet"
    handler.on_message(connection, ms.ReadyMsg("model", None))
    handler.on_message(connection, ms.HeartbeatMsg(1, 7, phase, 0.0))
    assert service.state.runs["r-1"].membership.step == step
