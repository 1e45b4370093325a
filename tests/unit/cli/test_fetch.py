"""What is brought: what is missing, whole, and never outside of the directory."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from shoal.cli.verbs.fetch import told
from shoal.errors import FetchFailed
from shoal.launch import project_upload
from shoal.launch.download import DownloadResult, LocalRunFolder, bring
from shoal.wire.api import FileView


class Told:
    """A coordinator that says that it has one file."""

    def __init__(self, name: str, data: bytes = b"x", breaks: bool = False) -> None:
        self.name, self.data, self.breaks = name, data, breaks

    def files(self) -> list[FileView]:
        return [FileView(self.name, len(self.data), 1000.0)]

    def open(self, name: str) -> BinaryIO:
        assert name == self.name
        if self.breaks:
            raise OSError("the line broke")
        return io.BytesIO(self.data)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    root = tmp_path / "c" / "runs" / "r" / "outputs"
    (root / "deep").mkdir(parents=True)
    (root / "deep" / "model.pt").write_bytes(b"model")
    (root / "best.pt").write_bytes(b"best")
    return root


def test_only_what_is_missing_or_other_is_brought(saved: Path, tmp_path: Path) -> None:
    source, to = LocalRunFolder(tmp_path / "c", "r"), tmp_path / "to"
    assert bring(source, to) == DownloadResult(("best.pt", "deep/model.pt"), 9, 0)
    assert bring(source, to) == DownloadResult((), 0, 2)
    (saved / "best.pt").write_bytes(b"bett")
    os.utime(saved / "best.pt", (2000.0, 2000.5))
    (to / "deep" / "model.pt").unlink()
    assert bring(source, to) == DownloadResult(("best.pt", "deep/model.pt"), 9, 0)
    assert (to / "best.pt").read_bytes() == b"bett"
    assert sorted(path.name for path in to.rglob("*")) == ["best.pt", "deep", "model.pt"]


def test_a_run_that_saved_nothing_brings_nothing(tmp_path: Path) -> None:
    found = bring(LocalRunFolder(tmp_path, "r"), tmp_path / "to")
    assert found == DownloadResult((), 0, 0)
    assert "nothing" in told(found, tmp_path)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", ""])
def test_whatever_a_coordinator_says_nothing_is_written_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(FetchFailed):
        bring(Told(name), tmp_path / "to")
    assert not list(tmp_path.rglob("evil"))


def test_what_breaks_in_the_middle_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"mine")
    with pytest.raises(FetchFailed, match="could not all be brought"):
        bring(Told("model.pt", breaks=True), tmp_path)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"mine"]


def test_what_is_told_is_short() -> None:
    many = DownloadResult(tuple(f"f{number}" for number in range(30)), 1, 2)
    text = told(many, Path("to"))
    assert text.startswith("brought f0, f1,")
    assert text.endswith("… to to; 2 files were there already")


def test_nothing_of_shoals_own_is_sent_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "project" / "mine"
    (home / "coordinators").mkdir(parents=True)
    (home / "coordinators" / "token").write_text("secret")
    (tmp_path / "project" / ".shoal").mkdir()
    (tmp_path / "project" / ".shoal" / "token").write_text("secret")
    (tmp_path / "project" / "train.py").write_text("")
    monkeypatch.setenv("SHOAL_HOME", str(home))
    assert set(project_upload.gathered(tmp_path / "project", {"more": tmp_path})) == {"train.py", "more"}


def test_no_token_is_sent_along_wherever_a_coordinator_or_a_user_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    root = tmp_path / "project"
    for name in (
        "srv/token",
        "srv/journal.jsonl",
        "srv/key.pem",
        "srv/tokens/ada",
        "lib/token",
        "ada.token",
        "train.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("secret")
    (root / "linked.token").symlink_to("ada.token")
    monkeypatch.chdir(root)
    assert set(project_upload.gathered(root, {}, "ada.token")) == {"lib/token", "train.py"}
