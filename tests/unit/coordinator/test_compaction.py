"""A journal that has become long is replaced by a snapshot of the state, and nothing is forgotten."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.coordinator.stage import create_run, member_connection, member_hello, open_service

from shoal.coordinator import compaction
from shoal.coordinator.compaction import Compactor
from shoal.coordinator.member_handler import MemberHandler
from shoal.coordinator.service import CoordinatorService
from shoal.core.membership import events as ev
from shoal.core.runs.spec import StoryLine
from shoal.errors import JournalUnwritable
from shoal.launch.offline_records import OfflineRecords
from shoal.store import journal, sqlite_views
from shoal.store.journal import Journal, Position
from shoal.wire import member_messages as ms


def trained(path: Path) -> CoordinatorService:
    """Return a coordinator whose only run has trained to step 5, has written a checkpoint and was scaled."""
    service, connection = open_service(path), member_connection()
    create_run(service, high=1)
    handler = MemberHandler(service)
    handler.on_message(connection, member_hello())
    handler.on_message(connection, ms.ReadyMsg("model", None))
    handler.on_message(connection, ms.HeartbeatMsg(1, 5, "compute", 0.0, loss=0.5, metrics={"accuracy": 0.9}))
    handler.on_message(connection, ms.CheckpointWrittenMsg(5, "there", 0, 0.0))
    service.handle("r-1", ev.ScaleRequested(1, 2))
    return service


def compact(service: CoordinatorService) -> bool:
    return asyncio.run(Compactor(service._journal, service.views, service.encode_state).compact())


def story_of(path: Path) -> list[StoryLine]:
    return sqlite_views.story(path, "r-1")


def test_restart_from_a_snapshot_knows_what_a_replay_of_everything_knew(tmp_path: Path) -> None:
    service = trained(tmp_path)
    state, story = service.encode_state(), asyncio.run(service.views.story(service.state.runs["r-1"], "", 0, 1000))
    assert compact(service)
    assert list(journal.read(tmp_path)) == []
    assert service.encode_state() == state
    service.close()
    again = open_service(tmp_path)
    again.replay()
    assert again.live.run("r-1").progress == service.live.run("r-1").progress
    assert again.views.run("r-1").loss == 0.5
    assert again.views.run("r-1").metrics == {"accuracy": 0.9}
    assert again.state.runs["r-1"].membership.checkpoint_step == 5
    again.close()
    assert [line.text for line in story_of(tmp_path)][: len(story)] == [line.text for line in story]
    assert [line.text for line in story_of(tmp_path)][-1] == "the coordinator restarted and replayed its journal"


def test_last_loss_outlives_a_crash_of_the_coordinator(tmp_path: Path) -> None:
    service = trained(tmp_path)
    asyncio.run(service.views.flush())
    service._journal.close()
    again = open_service(tmp_path)
    again.replay()
    assert (again.views.run("r-1").loss, again.views.run("r-1").metrics) == (0.5, {"accuracy": 0.9})
    again.close()


def test_events_between_snapshot_and_truncation_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = trained(tmp_path)
    real = Journal.write_snapshot

    def write_while_training_goes_on(self: Journal, position: Position, body: bytes) -> None:
        service._journal.append("r-1", ev.CheckpointWritten("local/0", 9, "later"), service.clock.now())
        real(self, position, body)

    monkeypatch.setattr(Journal, "write_snapshot", write_while_training_goes_on)
    assert compact(service)
    service.close()
    again = open_service(tmp_path)
    again.replay()
    assert again.state.runs["r-1"].membership.checkpoint_step == 9
    again.close()


def test_failed_compaction_leaves_the_journal_and_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = trained(tmp_path)
    before = service._journal.path.read_bytes()
    compactor = Compactor(service._journal, service.views, service.encode_state)
    monkeypatch.setattr(compaction, "MAX_EVENTS", 1)
    assert compactor.is_due()

    def full(self: Journal, position: Position, body: bytes) -> None:
        raise JournalUnwritable("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "write_snapshot", full)
        assert not asyncio.run(compactor.compact())
    assert service._journal.path.read_bytes() == before
    assert not compactor.is_due()
    assert asyncio.run(compactor.compact())
    assert not compactor.is_due(), "nothing is left to drop"
    service.close()


def test_state_that_cannot_be_encoded_does_not_end_the_coordinator(tmp_path: Path) -> None:
    service = trained(tmp_path)
    service.state.at = 1 << 70
    assert not compact(service)
    assert service._journal.events > 0
    service.close()


def test_state_that_cannot_be_decoded_again_replaces_no_events(tmp_path: Path) -> None:
    service = trained(tmp_path)
    compactor = Compactor(service._journal, service.views, lambda: service.encode_state()[:-1])
    assert not asyncio.run(compactor.compact())
    assert not (tmp_path / journal.SNAPSHOT_FILE).exists()
    assert service._journal.events > 0
    service.close()


def test_nothing_is_dropped_that_the_views_do_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = trained(tmp_path)
    before = service._journal.path.read_bytes()
    monkeypatch.setattr(sqlite_views.SqliteViews, "sync", lambda self: 2)
    assert not compact(service)
    assert service._journal.path.read_bytes() == before
    assert not (tmp_path / journal.SNAPSHOT_FILE).exists()
    service.close()


def test_story_says_what_is_gone_if_the_views_are_lost_after_a_snapshot(tmp_path: Path) -> None:
    service = trained(tmp_path)
    assert compact(service)
    service.handle("r-1", ev.ScaleRequested(1, 1))
    service.close()
    (tmp_path / sqlite_views.FILE).unlink()
    (view,) = OfflineRecords(tmp_path).runs()
    assert (view.step, view.loss, view.checkpoint_step) == (5, 0.5, 5)
    lines = [line.text for line in OfflineRecords(tmp_path).story("r-1")]
    assert lines[0] == "the story before this is gone"
    assert "scaled to 1 member" in lines
    (tmp_path / sqlite_views.FILE).unlink()
    again = open_service(tmp_path)
    again.replay()
    again.close()
    assert [line.text for line in story_of(tmp_path)][: len(lines)] == lines


def test_views_that_are_ahead_of_a_journal_cut_by_a_power_failure_keep_the_story(tmp_path: Path) -> None:
    service = trained(tmp_path)
    assert compact(service)
    before = [line.text for line in story_of(tmp_path)]
    service.handle("r-1", ev.ScaleRequested(1, 1))
    service.close()
    (tmp_path / journal.FILE).write_bytes(b"")
    again = open_service(tmp_path)
    again.replay()
    again.handle("r-1", ev.ScaleRequested(1, 3))
    again.close()
    lines = [line.text for line in story_of(tmp_path)]
    assert lines[: len(before)] == before
    assert "scaled to 1:1 members" not in lines, "what the journal lost never happened"
    assert "scaled to 1:3 members" in lines
