"""Files of runs at their coordinator: whole or not there, and never outside of the run's directory."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.coordinator.storage import run_files as filed
from shoal.coordinator.storage.run_files import ExpectedFile, RunFiles
from shoal.errors import BadRequest, CoordinatorFull, StorageError, UnknownFile, UploadCorrupt

ID = "0123456789abcdef"
NAME = "outputs/deep/model.pt"


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(lambda run: str(tmp_path / "runs" / run))


def whole(data: bytes) -> ExpectedFile:
    return ExpectedFile(len(data), hashlib.sha256(data).hexdigest())


def everything(tmp_path: Path) -> set[str]:
    return {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_file_appears_when_its_last_piece_has_come(files: RunFiles, tmp_path: Path) -> None:
    files.take("r", NAME, ID, 0, b"one")
    with pytest.raises(UnknownFile):
        files.path("r", NAME)
    assert files.page("r", "outputs").files == ()
    files.take("r", NAME, ID, 3, b"two", whole(b"onetwo"))
    assert files.path("r", NAME).read_bytes() == b"onetwo"
    assert [(one.name, one.size_bytes) for one in files.page("r", "outputs").files] == [("deep/model.pt", 6)]
    assert everything(tmp_path) == {f"runs/r/{NAME}"}


def test_an_empty_file_is_a_file(files: RunFiles) -> None:
    files.take("r", NAME, ID, 0, b"", whole(b""))
    assert files.path("r", NAME).read_bytes() == b""


def test_a_piece_that_is_sent_twice_counts_once(files: RunFiles) -> None:
    for _ in range(2):
        files.take("r", NAME, ID, 0, b"one")
    files.take("r", NAME, ID, 3, b"tw")
    files.take("r", NAME, ID, 3, b"two and more")
    files.take("r", NAME, ID, 3, b"two")
    for _ in range(2):
        files.take("r", NAME, ID, 6, b"!", whole(b"onetwo!"))
    assert files.path("r", NAME).read_bytes() == b"onetwo!"


def test_a_file_replaces_the_one_before_at_once(files: RunFiles) -> None:
    files.take("r", NAME, ID, 0, b"old", whole(b"old"))
    files.take("r", NAME, ID, 0, b"n")
    assert files.path("r", NAME).read_bytes() == b"old"
    files.take("r", NAME, ID, 1, b"ew", whole(b"new"))
    assert files.path("r", NAME).read_bytes() == b"new"


@pytest.mark.parametrize(
    "said", [whole(b"onetwo"), ExpectedFile(6, "0" * 64), ExpectedFile(3, hashlib.sha256(b"onetwo").hexdigest())]
)
def test_what_is_not_what_was_sent_is_not_kept(files: RunFiles, tmp_path: Path, said: ExpectedFile) -> None:
    files.take("r", NAME, ID, 0, b"one")
    with pytest.raises(UploadCorrupt):
        files.take("r", NAME, ID, 3, b"owt", said)
    assert everything(tmp_path) == set()


def test_a_piece_without_those_before_it_is_refused(files: RunFiles, tmp_path: Path) -> None:
    with pytest.raises(UploadCorrupt, match="did not arrive whole"):
        files.take("r", NAME, ID, 3, b"two", whole(b"onetwo"))
    assert everything(tmp_path) == set()


@pytest.mark.parametrize(
    "name",
    ["", "outputs", "outputs/", "outputs/../../x", "outputs//x", "outputs/./x", "/etc/passwd", "../x", "uploads/x",
     "journal.jsonl", "tensorboard/x", f"outputs/{'x' * 300}", "outputs/" + "a/" * 600 + "x", "outputs/a\0b"],
)  # fmt: skip
def test_no_name_leads_out_of_a_run(files: RunFiles, tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRequest):
        files.take("r", name, ID, 0, b"x", whole(b"x"))
    with pytest.raises(BadRequest):
        files.delete("r", name)
    assert everything(tmp_path) == set()


@pytest.mark.parametrize("upload", ["", "../../../../tmp/x", "0123456789ABCDEF", "0123"])
def test_no_upload_leads_out_of_a_run(files: RunFiles, upload: str) -> None:
    with pytest.raises(BadRequest, match="upload"):
        files.take("r", NAME, upload, 0, b"x")
    with pytest.raises(BadRequest, match="upload"):
        files.give_up("r", upload)


def test_a_link_leads_nowhere(files: RunFiles, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("mine")
    (tmp_path / "runs" / "r" / "outputs").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "outputs" / "link").symlink_to(outside)
    (tmp_path / "runs" / "r" / "outputs" / "file").symlink_to(outside / "secret")
    with pytest.raises(BadRequest):
        files.path("r", "outputs/link/secret")
    with pytest.raises(UnknownFile):
        files.path("r", "outputs/file")
    with pytest.raises(BadRequest):
        files.take("r", "outputs/link/secret", ID, 0, b"x", whole(b"x"))
    assert files.page("r", "outputs").files == ()


def test_the_last_of_the_disk_is_the_journals(files: RunFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.take("r", NAME, ID, 0, b"one")
    free = SimpleNamespace(free=filed.RESERVED_BYTES + 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: free)
    assert files.page("r", "outputs").free_bytes == 2
    with pytest.raises(CoordinatorFull):
        files.take("r", NAME, ID, 3, b"two")
    assert everything(tmp_path) == set(), "what does not fit takes no room"


def test_what_is_too_large_is_refused(files: RunFiles) -> None:
    with pytest.raises(BadRequest, match="too large"):
        files.take("r", NAME, ID, filed.MAX_FILE_BYTES, b"x")


def test_a_file_where_a_folder_is_cannot_be_kept(files: RunFiles, tmp_path: Path) -> None:
    files.take("r", NAME, ID, 0, b"x", whole(b"x"))
    with pytest.raises(StorageError, match="cannot keep"):
        files.take("r", "outputs/deep", ID, 0, b"x", whole(b"x"))
    assert everything(tmp_path) == {f"runs/r/{NAME}"}


def test_who_vanished_in_the_middle_leaves_nothing_for_long(files: RunFiles, tmp_path: Path) -> None:
    files.take("r", NAME, ID, 0, b"one")
    files.take("r", NAME, ID[::-1], 0, b"one")
    (old,) = (tmp_path / "runs" / "r" / "uploads").glob(f"{ID}*")
    os.utime(old, (1000.0, 1000.0))
    assert files.sweep("r", old.stat().st_mtime + filed.STALE_S + 1) == 1
    assert [path.name for path in (tmp_path / "runs" / "r" / "uploads").iterdir()] == [f"{ID[::-1]}.part"]
    assert files.sweep("nobody", 1.0) == 0


def test_leftovers_are_looked_for_now_and_then() -> None:
    swept: list[str] = []
    stub = SimpleNamespace(sweep=lambda run, _now: swept.append(run))
    at_tick = filed.sweep_every(stub, lambda: ["a"], 60.0)  # type: ignore[arg-type]
    for now in (100.0, 101.0, 159.0, 161.0):
        at_tick(now)
    assert swept == ["a", "a"]
