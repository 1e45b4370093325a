"""Session of a member beside servers: which placements count, and when it has to leave."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal import exit_codes
from shoal.core.placement import PartAssignment, Placement
from shoal.core.world import Address, Seat
from shoal.settings import RunSettings
from shoal.wire import member_messages as messages
from shoal.worker.parameter_server import rpc, served_session
from shoal.worker.parameter_server.served_session import WRITER_CLAIM, ServedSession
from shoal.worker.session.environment import MemberEnvironment
from shoal.worker.session.session import MemberExit
from shoal.worker.session.uplink import MemberUplink
from shoal.worker.transport.exchange_broken import ExchangeBroken

SEAT = Seat("s0", "1", Address("127.0.0.1", 9))
PLACEMENT = Placement(3, 1, (SEAT,), (PartAssignment("s0"), PartAssignment("s0")))


class RecordedSession(ServedSession):
    """A session without network, which records the messages that it sends."""

    def __init__(self, environment: MemberEnvironment) -> None:
        self.sent: list[Any] = []
        super().__init__(environment)

    def _send(self, message: Any) -> None:
        self.sent.append(message)


class Peers:
    """Connections to other servers; none can be reached."""

    address = SEAT.address

    def __init__(self, *_: Any, **__: Any) -> None:
        self.closed = False

    def connect(self, *_: Any) -> Any:
        raise ExchangeBroken("s0 is down")

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedSession]:
    (tmp_path / "token").write_text("token")
    monkeypatch.setattr(MemberUplink, "open", lambda _self: None)
    monkeypatch.setattr(MemberUplink, "close", lambda _self: None)
    monkeypatch.setattr(served_session, "Peers", Peers)
    environment = MemberEnvironment(
        "http://127.0.0.1:9", str(tmp_path / "token"), "r", "t0", "1", "127.0.0.1", {}, RunSettings(), "/runs/r"
    )
    made = RecordedSession(environment)
    yield made
    made.close()


def place(session: RecordedSession, placement: Placement = PLACEMENT) -> None:
    session._on_message(messages.PlacementMsg(placement, "test"))


def test_only_newer_placements_are_adopted(session: RecordedSession) -> None:
    adopted: list[int | None] = []
    session.on_placement = lambda placement: adopted.append(placement and placement.number)
    for number in (3, 2, 3, 5):
        place(session, replace(PLACEMENT, number=number))
    assert adopted == [3, 5]
    assert session.placement is not None
    assert (session.placement.number, session.wait_for_placement(after=4).number) == (5, 5)


def test_evicted_member_forgets_its_placement_and_its_claim(session: RecordedSession) -> None:
    adopted: list[Placement | None] = []
    place(session)
    session.on_placement = adopted.append
    session._claims[WRITER_CLAIM] = "granted"
    assert session.is_writer
    session._on_message(messages.EvictedMsg("away for too long"))
    assert (session.placement, adopted) == (None, [None])
    assert not session.is_writer
    place(session)
    assert session.placement == PLACEMENT, "the coordinator may send the same one again"


def test_server_is_never_the_writer(session: RecordedSession) -> None:
    session._claims[WRITER_CLAIM] = "granted"
    session.is_server = True
    assert not session.is_writer


def test_trainer_is_ready_without_a_step_and_a_server_with_its_own(session: RecordedSession) -> None:
    session.step = 4
    session.begin("model")
    session.is_server = True
    session.begin("model")
    session.report_restored(9)
    assert session.sent == [
        messages.ReadyMsg("model", None),
        messages.ReadyMsg("model", 4),
        messages.ReadyMsg("model", 9, restored=True),
    ]


def test_restore_is_requested_until_it_is_reported(session: RecordedSession) -> None:
    session._on_message(messages.RestoreMsg("no server has the state"))
    assert session.restore_requested
    session.report_restored(None)
    assert not session.restore_requested


def test_member_leaves_with_the_exit_code_of_the_stop(session: RecordedSession) -> None:
    session.raise_if_ended()
    session.step = 6
    session._on_message(messages.StopMsg("enough", True, 4))
    with pytest.raises(MemberExit) as stopped:
        session.wait_for_placement(after=0)
    assert stopped.value.code == 4
    assert session.sent[-1] == messages.LeftMsg(6)


def test_member_with_notice_leaves_resumable_and_is_overdue_near_its_deadline(session: RecordedSession) -> None:
    assert not session.overdue()
    session.leave(600.0, "spot")
    assert (session.leaving, session.overdue(), session.overdue(margin_s=601.0)) == ("spot", False, True)
    with pytest.raises(MemberExit) as left:
        session.raise_if_ended()
    assert left.value.code == exit_codes.RESUMABLE


def test_finished_run_ends_a_member_with_success(session: RecordedSession) -> None:
    session._on_message(messages.RunFinishedMsg(8))
    assert session.finished
    with pytest.raises(MemberExit) as finished:
        session.raise_if_ended()
    assert finished.value.code == exit_codes.OK


def test_first_error_of_another_thread_is_raised_in_the_main_thread(session: RecordedSession) -> None:
    session.fail(ValueError("first"))
    session.fail(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        session.pause(60.0)


def test_end_of_the_loop_is_reported_early_or_not(session: RecordedSession, capsys: pytest.CaptureFixture[str]) -> None:
    session.report_done(12)
    session.leave_loop()
    assert session.sent == [messages.DoneMsg(12), messages.DoneMsg(12, early=True)]
    assert "left the training loop at step 12" in capsys.readouterr().err


def test_lost_trainers_and_unconfirmed_reports_reach_the_server(session: RecordedSession) -> None:
    lost: list[tuple[str, str]] = []
    session.on_trainer_lost = lambda member, incarnation: lost.append((member, incarnation))
    session._on_message(messages.TrainerLostMsg("t1", "7", "killed"))
    assert lost == [("t1", "7")]
    report = messages.PartReleasedMsg(1, 3)
    session.unconfirmed = lambda: [report]
    assert session._hello()[-1] == report


def test_part_of_a_server_out_of_reach_is_none(session: RecordedSession, monkeypatch: pytest.MonkeyPatch) -> None:
    assert session.fetch(rpc.FetchPart(1, 1), SEAT) is None
    replies = iter([rpc.ServerReply("moved"), rpc.ServerReply("done", meta=b"m", sizes=(2, 1))])
    monkeypatch.setattr(session.peers, "connect", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(rpc, "send", lambda *_: None)
    monkeypatch.setattr(rpc, "receive_reply", lambda _sock: (next(replies), memoryview(b"abc")))
    monkeypatch.setattr(served_session, "disown", lambda _sock: None)
    assert session.fetch(rpc.FetchPart(1, 1), SEAT) is None, "another server has it now"
    fetched = session.fetch(rpc.FetchPart(1, 1), SEAT)
    assert fetched is not None
    assert (fetched[0], [buffer.tobytes() for buffer in fetched[1]]) == (b"m", [b"ab", b"c"])


def test_pause_ends_when_a_message_arrives_or_the_time_is_over(session: RecordedSession) -> None:
    began = time.monotonic()
    session.pause(0.0)
    assert time.monotonic() - began < 30.0
