"""Saved files are uploaded if the machine does not share the user's disk, and stay where they are otherwise."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import OutputUploadFailed
from shoal.worker import join as worker_join
from shoal.worker.evaluation import evaluate
from shoal.worker.session import environment, output_upload

ENVIRONMENT = environment.read(
    {
        "SHOAL_URL": "http://there",
        "SHOAL_TOKEN_FILE": "token",
        "SHOAL_RUN": "r",
        "SHOAL_MEMBER": "far/0",
        "SHOAL_INCARNATION": "a",
        "SHOAL_MEMBER_HOSTS": "h",
        "SHOAL_RUN_DIR": "/runs/r",
    }
)
assert ENVIRONMENT is not None


class FakeStore:
    """A store that keeps what is put into it, or fails."""

    def __init__(self, fails: OSError | None = None) -> None:
        self.blobs: dict[str, bytes] = {}
        self.fails = fails

    def put(self, name: str, chunks: Iterable[bytes]) -> int:
        if self.fails is not None:
            raise self.fails
        self.blobs[name] = b"".join(chunks)
        return len(self.blobs[name])


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeStore]:
    opened: dict[str, FakeStore] = {}
    monkeypatch.setattr(output_upload, "open_store", lambda where, _access: opened.setdefault(where, FakeStore()))
    return opened


@pytest.mark.parametrize("path", ["model.pt", "./model.pt", "sub/../model.pt", "{here}/model.pt"])
def test_file_saved_in_the_project_is_uploaded_under_its_name(
    stores: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "model.pt").write_bytes(b"model")
    output_upload.upload_output(replace(ENVIRONMENT, upload_dir=str(tmp_path)), path.format(here=tmp_path))
    assert stores["coordinator://r/outputs"].blobs == {"model.pt": b"model"}


def test_relative_path_counts_from_the_current_directory(
    stores: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    (tmp_path / "sub" / "model.pt").write_bytes(b"model")
    output_upload.upload_output(replace(ENVIRONMENT, upload_dir=str(tmp_path)), "model.pt")
    assert stores["coordinator://r/outputs"].blobs == {"sub/model.pt": b"model"}


def test_file_saved_elsewhere_stays_and_is_reported(
    stores: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "project").mkdir()
    output_upload.upload_output(replace(ENVIRONMENT, upload_dir=str(tmp_path / "project")), str(tmp_path / "model.pt"))
    assert stores == {}
    assert "stays on this machine" in capsys.readouterr().err


def test_nothing_is_uploaded_with_a_shared_disk(stores: Any, tmp_path: Path) -> None:
    output_upload.upload_output(ENVIRONMENT, str(tmp_path / "model.pt"))
    output_upload.upload_output(None, str(tmp_path / "model.pt"))
    assert stores == {}


def test_failed_upload_names_the_local_copy(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"model")
    full = FakeStore(OSError(errno.ENOSPC, "no room"))
    with pytest.raises(OutputUploadFailed) as raised:
        output_upload.upload(full, "model.pt", str(tmp_path / "model.pt"), "far/0")  # type: ignore[arg-type]
    assert "far/0" in raised.value.where
    assert str(tmp_path / "model.pt") in raised.value.where
    assert "no room" in raised.value.why


@pytest.mark.parametrize(
    ("to", "store", "found"),
    [
        ("", "", "/runs/r/checkpoints"),
        ("", "coordinator://r", "coordinator://r/checkpoints"),
        ("coordinator://", "", "coordinator://r/checkpoints"),
        ("s3://bucket/", "coordinator://r", "s3://bucket/r"),
        ("/data", "", "/data/r"),
    ],
)
def test_checkpoints_go_where_all_members_find_them(to: str, store: str, found: str) -> None:
    environment_ = replace(ENVIRONMENT, checkpoint_store=store, values=environment.RunSettings(checkpoint_to=to))
    assert worker_join.checkpoint_directory(environment_) == found


def test_best_model_is_uploaded_before_the_evaluation_is_reported(
    stores: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reported: list[Any] = []
    client = SimpleNamespace(
        report=lambda found: reported.append((found.export, dict(stores["coordinator://r/outputs"].blobs)))
    )
    session: Any = SimpleNamespace(
        me="far/e",
        set_phase=lambda _name: None,
        loaded=lambda _step: None,
        client=client,
        environment=replace(ENVIRONMENT, upload_dir=str(tmp_path)),
    )
    training_state: Any = SimpleNamespace(restore=lambda: 7)
    request = evaluate.evaluation_request(lambda: {"loss": 0.5}, "min:loss", None, "models/best.pt")
    write = lambda path: Path(path).write_bytes(b"best")  # noqa: E731
    assert evaluate._evaluate_newest(session, training_state, request, write, 0.9) == (7, 0.5)
    assert reported == [("models/best.pt", {"models/best.pt": b"best"})]
    stores.clear()
    stores["coordinator://r/outputs"] = FakeStore()
    assert evaluate._evaluate_newest(session, training_state, request, write, 0.1) == (7, 0.1)
    assert reported[1] == ("", {}), "one that is no better is not sent"
