"""What a member saves comes back if its machine is apart, and stays where it was meant to be otherwise."""

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

TOLD = environment.read(
    {
        "SHOAL_URL": "http://there",
        "SHOAL_TOKEN_FILE": "token",
        "SHOAL_RUN": "r",
        "SHOAL_MEMBER": "far/0",
        "SHOAL_INCARNATION": "a",
        "SHOAL_HOST": "h",
        "SHOAL_RUN_DIR": "/runs/r",
    }
)
assert TOLD is not None


class Kept:
    """A store that remembers, or fails."""

    def __init__(self, fails: OSError | None = None) -> None:
        self.blobs: dict[str, bytes] = {}
        self.fails = fails

    def put(self, name: str, chunks: Iterable[bytes]) -> int:
        if self.fails is not None:
            raise self.fails
        self.blobs[name] = b"".join(chunks)
        return len(self.blobs[name])


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kept]:
    opened: dict[str, Kept] = {}
    monkeypatch.setattr(output_upload, "open_store", lambda where, _access: opened.setdefault(where, Kept()))
    return opened


@pytest.mark.parametrize("path", ["model.pt", "./model.pt", "sub/../model.pt", "{here}/model.pt"])
def test_what_is_saved_in_the_project_comes_back_under_its_name(
    kept: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "model.pt").write_bytes(b"model")
    output_upload.bring_back(replace(TOLD, apart=str(tmp_path)), path.format(here=tmp_path))
    assert kept["coordinator://r/outputs"].blobs == {"model.pt": b"model"}


def test_a_script_that_went_into_a_folder_saves_there(
    kept: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    (tmp_path / "sub" / "model.pt").write_bytes(b"model")
    output_upload.bring_back(replace(TOLD, apart=str(tmp_path)), "model.pt")
    assert kept["coordinator://r/outputs"].blobs == {"sub/model.pt": b"model"}


def test_what_is_saved_elsewhere_stays_there_and_that_is_said(
    kept: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "project").mkdir()
    output_upload.bring_back(replace(TOLD, apart=str(tmp_path / "project")), str(tmp_path / "model.pt"))
    assert kept == {}
    assert "stays on this machine" in capsys.readouterr().err


def test_with_a_shared_disk_nothing_is_sent(kept: Any, tmp_path: Path) -> None:
    output_upload.bring_back(TOLD, str(tmp_path / "model.pt"))
    output_upload.bring_back(None, str(tmp_path / "model.pt"))
    assert kept == {}


def test_what_cannot_be_sent_is_still_there_and_it_is_said_where(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"model")
    full = Kept(OSError(errno.ENOSPC, "no room"))
    with pytest.raises(OutputUploadFailed) as raised:
        output_upload.send(full, "model.pt", str(tmp_path / "model.pt"), "far/0")  # type: ignore[arg-type]
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
    told = replace(TOLD, store=store, values=environment.RunSettings(checkpoint_to=to))
    assert worker_join.checkpoint_directory(told) == found


def test_the_best_model_of_an_evaluator_comes_back_before_it_is_told_of(
    kept: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[Any] = []
    line = SimpleNamespace(
        report=lambda found: said.append((found.export, dict(kept["coordinator://r/outputs"].blobs)))
    )
    session: Any = SimpleNamespace(
        me="far/e",
        set_phase=lambda _name: None,
        loaded=lambda _step: None,
        client=line,
        environment=replace(TOLD, apart=str(tmp_path)),
    )
    keeper: Any = SimpleNamespace(restore=lambda: 7)
    wish = evaluate.evaluation_request(lambda: {"loss": 0.5}, "min:loss", None, "models/best.pt")
    write = lambda path: Path(path).write_bytes(b"best")  # noqa: E731
    assert evaluate._evaluate_newest(session, keeper, wish, write, 0.9) == (7, 0.5)
    assert said == [("models/best.pt", {"models/best.pt": b"best"})]
    kept.clear()
    kept["coordinator://r/outputs"] = Kept()
    assert evaluate._evaluate_newest(session, keeper, wish, write, 0.1) == (7, 0.1)
    assert said[1] == ("", {}), "one that is no better is not sent"
