"""A store at the coordinator: as good as a directory, whatever the network does in between."""

from __future__ import annotations

import errno
import http.client
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from shoal.coordinator.http.auth import USER
from shoal.coordinator.http.file_routes import FileRoutes
from shoal.coordinator.http.routes import _json
from shoal.coordinator.storage.run_files import RunFiles
from shoal.errors import CheckpointFailed, PermissionDenied, StoreUnusable, UnknownRun
from shoal.settings import RunSettings
from shoal.store import checkpoint, coordinator_store
from shoal.store.blob_store import Blob, CoordinatorAccess, LocalStore, open_store
from shoal.store.coordinator_store import CoordinatorStore
from shoal.testing.asgi_client import AsgiConnection, FakeResponse
from shoal.wire import credentials
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.training.training_state import StateCodec, TrainingState
from shoal.worker.transport.snapshot import Snapshot

Fail = Callable[[str, str], None]


class Town:
    """A coordinator's files and a store of them; the clock advances only while the store waits."""

    def __init__(self, path: Path, user: str = "") -> None:
        self.path, self.now, self.said, self.asked = path / "runs", 0.0, [], []
        self.fail: Fail = lambda _method, _target: None
        self.cut_at: Callable[[str, str], int | None] = lambda _method, _target: None
        filing = FileRoutes(RunFiles(lambda run: str(self.path / run)), self.run_of)
        inner = Starlette(routes=[Route(at, _json(one), methods=[how]) for at, how, one in filing.endpoints()])

        async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
            await inner(scope | {USER: user}, receive, send)

        self.app = app
        credentials.write(path / "token", credentials.Credentials("secret"))
        self.access = CoordinatorAccess("http://there", str(path / "token"))

    def run_of(self, user: str, run: str) -> str:
        if run != "r":
            raise UnknownRun(f"there is no run {run}")
        if user == "bob":
            raise PermissionDenied("not of bob")
        return run

    def connect(self) -> http.client.HTTPConnection:
        def fail(method: str, target: str) -> None:
            self.asked.append((method, target))
            self.fail(method, target)

        return AsgiConnection(self.app, fail, lambda method, target: self.cut_at(method, target))

    def store(self, folder: str = "checkpoints", run: str = "r") -> CoordinatorStore:
        return CoordinatorStore(
            self.access,
            run,
            folder,
            connect=self.connect,
            clock=lambda: self.now,
            sleep=self.sleep,
            warn=self.said.append,
        )

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.01)


@pytest.fixture
def town(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Town:
    monkeypatch.setattr(coordinator_store, "PIECE_BYTES", 4)
    return Town(tmp_path)


def content(store: CoordinatorStore, name: str) -> bytes:
    with store.open(name) as file:
        return file.read()


def broken(times: int, method: str = "PUT") -> Fail:
    left = [times]

    def fail(asked: str, _target: str) -> None:
        if asked == method and left[0]:
            left[0] -= 1
            raise ConnectionRefusedError("nothing listens")

    return fail


def test_what_is_put_can_be_read_listed_and_deleted(town: Town) -> None:
    store = town.store()
    assert store.put("b", [b"one", b"", b"two", b"three"]) == 11
    assert store.put("a.x", []) == 0
    assert content(store, "b") == b"onetwothree"
    assert content(store, "a.x") == b""
    assert store.list() == [Blob("a.x", 0), Blob("b", 11)]
    assert store.list("a") == [Blob("a.x", 0)]
    assert (store.free_bytes() or 0) > 0
    store.delete("a")
    assert store.list() == [Blob("b", 11)]
    assert (town.path / "r" / "checkpoints" / "b").read_bytes() == b"onetwothree"
    assert store.where == "coordinator://r/checkpoints"


def test_a_name_with_folders_and_odd_letters_is_the_same_there(town: Town) -> None:
    store = town.store("outputs")
    store.put("a b/ü#?%.pt", [b"x"])
    assert (town.path / "r" / "outputs" / "a b" / "ü#?%.pt").read_bytes() == b"x"
    assert content(store, "a b/ü#?%.pt") == b"x"


def test_a_coordinator_that_is_away_for_a_while_costs_no_piece(town: Town) -> None:
    town.fail = broken(12)
    assert town.store().put("a", [b"0123456789"]) == 10
    assert content(town.store(), "a") == b"0123456789"
    assert len(town.said) == 1
    assert "waiting for the coordinator at http://there" in town.said[0]


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_an_answer_that_is_lost_costs_nothing(town: Town, lost: int) -> None:
    """The request is carried out, but the line breaks before the answer; also after the very last piece."""
    asked: list[str] = []

    class Deaf(AsgiConnection):
        def getresponse(self) -> Any:
            answer = super().getresponse()
            asked.append("")
            if len(asked) == lost:
                raise http.client.RemoteDisconnected("cut")
            return answer

    store = town.store()
    store._connect = lambda: Deaf(town.app)
    assert store.put("a", [b"0123456789"]) == 10
    assert content(town.store(), "a") == b"0123456789"
    assert len(asked) == 4


def test_patience_has_an_end_and_nothing_is_left(town: Town) -> None:
    sent = []

    def fail(method: str, target: str) -> None:
        sent.append(method)
        if method == "PUT" and "offset=4" in target:
            raise ConnectionResetError("cut")

    town.fail = fail
    with pytest.raises(OSError, match=r"has not answered for 9\d s") as raised:
        town.store().put("a", [b"0123456789"])
    assert raised.value.errno == errno.EIO
    assert sent[-1] == "DELETE"
    assert [path for path in town.path.rglob("*") if path.is_file()] == []


def test_no_way_to_the_coordinator_is_an_error_of_the_storage(town: Town) -> None:
    def cut_off(_method: str, _target: str) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    town.fail = cut_off
    with pytest.raises(OSError, match=r"has not answered for 9. s: _NoConnection.*No route to host"):
        town.store().put("a", [b"x"])


def test_a_source_that_fails_leaves_nothing(town: Town) -> None:
    def chunks():  # type: ignore[no-untyped-def]
        yield b"0123456789"
        raise LookupError("gone")

    with pytest.raises(LookupError):
        town.store().put("a", chunks())
    assert [path for path in town.path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("arrived", [0, 60])
def test_reading_goes_on_where_the_line_broke(town: Town, arrived: int) -> None:
    town.store().put("a", [bytes(range(200))])
    asked: list[str] = []

    def cut_at(method: str, target: str) -> int | None:
        asked.append(target)
        return arrived if len(asked) < 3 else None

    town.cut_at = cut_at
    assert content(town.store(), "a") == bytes(range(200))
    assert len(asked) == 3


def test_reading_goes_on_after_any_error_of_the_line(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """A route that is lost for a moment breaks a connection with another error than a coordinator that is gone."""
    town.store().put("a", [bytes(range(200))])
    reading, broken = town.store().open("a"), []

    def no_route(answer: FakeResponse, _buffer: memoryview) -> int:
        broken.append(answer)
        monkeypatch.undo()
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(FakeResponse, "readinto", no_route)
    assert reading.read() == bytes(range(200))
    assert len(broken) == 1


def test_a_blob_that_changed_meanwhile_is_not_read_half_and_half(town: Town) -> None:
    town.store().put("a", [bytes(100)])
    town.cut_at = lambda _method, _target: 60
    with town.store().open("a") as file:
        assert file.read(10) == bytes(10)
        (town.path / "r" / "checkpoints" / "a").write_bytes(b"x" * 300)
        with pytest.raises(OSError, match="blob changed"):
            file.read()


def test_what_is_not_there_is_said_so(town: Town) -> None:
    with pytest.raises(FileNotFoundError):
        town.store().open("nothing")
    with pytest.raises(FileNotFoundError, match="there is no run"):
        town.store(run="other").list()


def test_what_the_coordinator_cannot_keep_is_said_as_it_was(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.coordinator.storage.disk_reserve.RESERVED_BYTES", 1 << 60)
    with pytest.raises(OSError, match="no space") as raised:
        town.store().put("a", [b"x"])
    assert raised.value.errno == errno.ENOSPC
    assert town.now < 1.0, "it is not tried again"


def snapshot(step: int, size: int = 300) -> Snapshot:
    return Snapshot(step, b"header", [np.full(size, step, np.uint8), np.zeros(0, np.uint8)], readers=1)


def test_checkpoints_are_written_read_and_pruned_there(town: Town) -> None:
    store = town.store()
    for step in (1, 2, 3):
        town.fail = broken(step)
        checkpoint.write(store, snapshot(step), "me", run="r", world=1, meta={})
    found = checkpoint.read(town.store())
    assert (found.entry.step, found.header, found.buffers[0].tolist()) == (3, b"header", [3] * 300)
    assert checkpoint.prune(store, 2) == ["step-000000000001.world-00000001"]
    assert [entry.step for entry in checkpoint.entries(LocalStore(town.path / "r" / "checkpoints"))] == [3, 2]


def test_a_disk_that_is_full_there_costs_one_checkpoint_and_no_older_one(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.write(town.store(), snapshot(1), "me", run="r", world=1, meta={})
    monkeypatch.setattr("shoal.coordinator.storage.disk_reserve.RESERVED_BYTES", 1 << 60)
    with pytest.raises(
        CheckpointFailed, match="cannot write the checkpoint of step 2 to coordinator://r/checkpoints"
    ) as raised:
        checkpoint.write(town.store(), snapshot(2), "me", run="r", world=1, meta={})
    assert "free some space" in raised.value.do
    assert checkpoint.read(town.store()).entry.step == 1


def test_a_step_does_not_wait_for_a_checkpoint_that_is_on_its_way(town: Town) -> None:
    on_its_way, may_go_on = threading.Event(), threading.Event()

    def fail(method: str, _target: str) -> None:
        if method == "PUT":
            on_its_way.set()
            assert may_go_on.wait(20)

    town.fail = fail
    session = StandaloneSession()
    session.settings = RunSettings(checkpoint_every_steps=1)
    codec = StateCodec(lambda _parts: (b"", [np.zeros(40, np.uint8)]), lambda _parts, _header, _buffers: None)
    # Not "": a checkpoint that missed the store below would land in the working directory.
    state = TrainingState(session, "r", str(town.path / "nowhere"), codec)
    state.open_store = town.store  # type: ignore[method-assign]
    for step in (1, 2, 3):
        state.at_boundary(step)
        state.before_change()
    assert on_its_way.wait(20), "no checkpoint was begun"
    may_go_on.set()
    state.close()
    assert not (town.path / "nowhere").exists()
    assert [entry.step for entry in checkpoint.entries(town.store())] == [1], "one at a time"


def test_users_read_files_of_their_own_runs_and_write_none(tmp_path: Path) -> None:
    ada, bob = Town(tmp_path, "ada"), Town(tmp_path, "bob")
    (tmp_path / "runs" / "r" / "outputs").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "outputs" / "m").write_text("x")
    assert content(ada.store("outputs"), "m") == b"x"
    with pytest.raises(OSError, match="ada may not write"):
        ada.store("outputs").put("n", [b"x"])
    with pytest.raises(OSError, match="ada may not write"):
        ada.store("outputs").delete("m")
    with pytest.raises(OSError, match="not of bob"):
        bob.store("outputs").list()
    assert (tmp_path / "runs" / "r" / "outputs" / "m").exists()


def test_a_place_at_the_coordinator_needs_one(tmp_path: Path) -> None:
    there = CoordinatorAccess("http://there", str(tmp_path / "token"))
    assert isinstance(open_store("coordinator://r/checkpoints", there), CoordinatorStore)
    for where, access in (("coordinator://r/checkpoints", None), ("coordinator://r", there), ("coordinator://", there)):
        with pytest.raises(StoreUnusable, match="cannot be used"):
            open_store(where, access)
