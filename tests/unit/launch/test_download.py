"""Downloads copy what is missing, completely, and never write outside the target directory."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from shoal.errors import FetchFailed
from shoal.launch.download import DownloadResult, LocalRunFolder, download
from shoal.wire.api import FileView


class OneFile:
    """A coordinator's folder that lists one file."""

    def __init__(self, name: str, breaks: bool = False) -> None:
        self.name, self.data, self.breaks = name, b"x", breaks

    def files(self) -> list[FileView]:
        return [FileView(self.name, len(self.data), 1000.0)]

    def open(self, name: str) -> BinaryIO:
        assert name == self.name
        if self.breaks:
            raise OSError("connection lost")
        return io.BytesIO(self.data)


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    root = tmp_path / "c" / "runs" / "r" / "outputs"
    (root / "deep").mkdir(parents=True)
    (root / "deep" / "model.pt").write_bytes(b"model")
    (root / "best.pt").write_bytes(b"best")
    return root


def test_only_missing_or_changed_files_are_downloaded(outputs: Path, tmp_path: Path) -> None:
    source, to = LocalRunFolder(tmp_path / "c", "r"), tmp_path / "to"
    assert download(source, to) == DownloadResult(("best.pt", "deep/model.pt"), 9, 0)
    assert download(source, to) == DownloadResult((), 0, 2)
    (outputs / "best.pt").write_bytes(b"bett")
    os.utime(outputs / "best.pt", (2000.0, 2000.5))
    (to / "deep" / "model.pt").unlink()
    assert download(source, to) == DownloadResult(("best.pt", "deep/model.pt"), 9, 0)
    assert (to / "best.pt").read_bytes() == b"bett"
    assert sorted(path.name for path in to.rglob("*")) == ["best.pt", "deep", "model.pt"]


def test_run_without_outputs_creates_no_directory(tmp_path: Path) -> None:
    assert download(LocalRunFolder(tmp_path, "r"), tmp_path / "to") == DownloadResult((), 0, 0)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", ""])
def test_name_that_leads_out_of_the_directory_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(FetchFailed):
        download(OneFile(name), tmp_path / "to")
    assert not list(tmp_path.rglob("evil"))


def test_broken_download_keeps_the_existing_file(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"mine")
    with pytest.raises(FetchFailed, match="could not be downloaded"):
        download(OneFile("model.pt", breaks=True), tmp_path)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"mine"]
