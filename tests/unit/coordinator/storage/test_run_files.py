"""Files of runs: stored completely or not at all, and never outside the run's directory."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.coordinator.storage import disk_reserve, run_files
from shoal.coordinator.storage.run_files import ExpectedFile, RunFiles
from shoal.errors import BadRequest, CoordinatorFull, StorageError, UnknownFile, UploadCorrupt

ID = "0123456789abcdef"
NAME = "outputs/deep/model.pt"


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(lambda run: str(tmp_path / "runs" / run))


def expected(data: bytes) -> ExpectedFile:
    return ExpectedFile(len(data), hashlib.sha256(data).hexdigest())


def all_files(tmp_path: Path) -> set[str]:
    return {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}


def test_file_appears_with_its_last_chunk(files: RunFiles, tmp_path: Path) -> None:
    files.put("r", NAME, ID, 0, b"one")
    with pytest.raises(UnknownFile):
        files.path("r", NAME)
    assert files.page("r", "outputs").files == ()
    files.put("r", NAME, ID, 3, b"two", expected(b"onetwo"))
    assert files.path("r", NAME).read_bytes() == b"onetwo"
    assert [(file.name, file.size_bytes) for file in files.page("r", "outputs").files] == [("deep/model.pt", 6)]
    assert all_files(tmp_path) == {f"runs/r/{NAME}"}


def test_empty_file_is_stored(files: RunFiles) -> None:
    files.put("r", NAME, ID, 0, b"", expected(b""))
    assert files.path("r", NAME).read_bytes() == b""


def test_repeated_chunk_counts_once(files: RunFiles) -> None:
    for _ in range(2):
        files.put("r", NAME, ID, 0, b"one")
    files.put("r", NAME, ID, 3, b"tw")
    files.put("r", NAME, ID, 3, b"two and more")
    files.put("r", NAME, ID, 3, b"two")
    for _ in range(2):
        files.put("r", NAME, ID, 6, b"!", expected(b"onetwo!"))
    assert files.path("r", NAME).read_bytes() == b"onetwo!"


def test_new_file_replaces_the_old_one_atomically(files: RunFiles) -> None:
    files.put("r", NAME, ID, 0, b"old", expected(b"old"))
    files.put("r", NAME, ID, 0, b"n")
    assert files.path("r", NAME).read_bytes() == b"old"
    files.put("r", NAME, ID, 1, b"ew", expected(b"new"))
    assert files.path("r", NAME).read_bytes() == b"new"


@pytest.mark.parametrize(
    "wrong", [expected(b"onetwo"), ExpectedFile(6, "0" * 64), ExpectedFile(3, hashlib.sha256(b"onetwo").hexdigest())]
)
def test_corrupt_upload_is_discarded(files: RunFiles, tmp_path: Path, wrong: ExpectedFile) -> None:
    files.put("r", NAME, ID, 0, b"one")
    with pytest.raises(UploadCorrupt):
        files.put("r", NAME, ID, 3, b"owt", wrong)
    assert all_files(tmp_path) == set()


def test_chunk_after_a_gap_is_refused(files: RunFiles, tmp_path: Path) -> None:
    with pytest.raises(UploadCorrupt, match="is incomplete"):
        files.put("r", NAME, ID, 3, b"two", expected(b"onetwo"))
    assert all_files(tmp_path) == set()


@pytest.mark.parametrize(
    "name",
    ["", "outputs", "outputs/", "outputs/../../x", "outputs//x", "outputs/./x", "/etc/passwd", "../x", "uploads/x",
     "journal.jsonl", "tensorboard/x", f"outputs/{'x' * 300}", "outputs/" + "a/" * 600 + "x", "outputs/a\0b"],
)  # fmt: skip
def test_file_name_cannot_lead_out_of_the_run(files: RunFiles, tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRequest):
        files.put("r", name, ID, 0, b"x", expected(b"x"))
    with pytest.raises(BadRequest):
        files.delete("r", name)
    assert all_files(tmp_path) == set()


@pytest.mark.parametrize("upload", ["", "../../../../tmp/x", "0123456789ABCDEF", "0123"])
def test_upload_id_cannot_lead_out_of_the_run(files: RunFiles, upload: str) -> None:
    with pytest.raises(BadRequest, match="upload"):
        files.put("r", NAME, upload, 0, b"x")
    with pytest.raises(BadRequest, match="upload"):
        files.abort("r", upload)


def test_links_are_not_followed(files: RunFiles, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (tmp_path / "runs" / "r" / "outputs").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "outputs" / "link").symlink_to(outside)
    (tmp_path / "runs" / "r" / "outputs" / "file").symlink_to(outside / "secret")
    with pytest.raises(BadRequest):
        files.path("r", "outputs/link/secret")
    with pytest.raises(UnknownFile):
        files.path("r", "outputs/file")
    with pytest.raises(BadRequest):
        files.put("r", "outputs/link/secret", ID, 0, b"x", expected(b"x"))
    assert files.page("r", "outputs").files == ()


def test_last_bytes_of_the_disk_are_reserved_for_the_journal(
    files: RunFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.put("r", NAME, ID, 0, b"one")
    free = SimpleNamespace(free=disk_reserve.RESERVED_BYTES + 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: free)
    assert files.page("r", "outputs").free_bytes == 2
    with pytest.raises(CoordinatorFull):
        files.put("r", NAME, ID, 3, b"two")
    assert all_files(tmp_path) == set(), "a failed upload frees its space"


def test_file_over_the_limit_is_refused(files: RunFiles) -> None:
    with pytest.raises(BadRequest, match="too large"):
        files.put("r", NAME, ID, run_files.MAX_FILE_BYTES, b"x")


def test_file_cannot_replace_a_folder(files: RunFiles, tmp_path: Path) -> None:
    files.put("r", NAME, ID, 0, b"x", expected(b"x"))
    with pytest.raises(StorageError, match="cannot store"):
        files.put("r", "outputs/deep", ID, 0, b"x", expected(b"x"))
    assert all_files(tmp_path) == {f"runs/r/{NAME}"}


def test_stale_upload_is_swept(files: RunFiles, tmp_path: Path) -> None:
    files.put("r", NAME, ID, 0, b"one")
    files.put("r", NAME, ID[::-1], 0, b"one")
    (old,) = (tmp_path / "runs" / "r" / "uploads").glob(f"{ID}*")
    os.utime(old, (1000.0, 1000.0))
    assert files.sweep("r", old.stat().st_mtime + run_files.STALE_S + 1) == 1
    assert [path.name for path in (tmp_path / "runs" / "r" / "uploads").iterdir()] == [f"{ID[::-1]}.part"]
    assert files.sweep("unknown", 1.0) == 0


def test_sweep_runs_once_per_interval() -> None:
    swept: list[str] = []
    stub = SimpleNamespace(sweep=lambda run, _now: swept.append(run))
    on_tick = run_files.sweep_every(stub, lambda: ["a"], 60.0)  # type: ignore[arg-type]
    for now in (100.0, 101.0, 159.0, 161.0):
        on_tick(now)
    assert swept == ["a", "a"]
