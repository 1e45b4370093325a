"""Collecting, linking and verifying the files of files=."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.errors import BadFiles, PackDamaged
from shoal.pack import files, manifest


@pytest.fixture
def source_dir(tmp_path: Path) -> Path:
    root = tmp_path / "sources"
    (root / "package" / "deep").mkdir(parents=True)
    (root / "package" / "__pycache__").mkdir()
    (root / "data.csv").write_text("1,2\n")
    (root / "same.csv").write_text("1,2\n")
    (root / "package" / "__init__.py").write_text("")
    (root / "package" / "deep" / "code.py").write_text("X = 1\n")
    (root / "package" / "__pycache__" / "code.pyc").write_text("old")
    return root


def test_path_keeps_its_last_name_and_directory_its_structure(source_dir: Path) -> None:
    collected = files.collect([source_dir / "data.csv", source_dir / "package"])
    assert sorted(collected) == ["data.csv", "package/__init__.py", "package/deep/code.py"]


def test_links_are_sent_as_their_targets_except_directories_elsewhere(source_dir: Path) -> None:
    (source_dir / "elsewhere").mkdir()
    (source_dir / "elsewhere" / "huge.bin").touch()
    links = {"inner": "deep", "deep/up": "..", "far": "../elsewhere", "data.csv": "../data.csv"}
    for link, target in links.items():
        (source_dir / "package" / link).symlink_to(target)
    collected = files.collect([source_dir / "package"])
    usual = ["package/__init__.py", "package/data.csv", "package/deep/code.py"]
    assert sorted(collected) == [*usual, "package/inner/code.py"]
    (source_dir / "package" / "gone").symlink_to("nowhere")
    with pytest.raises(BadFiles, match="gone"):
        files.collect([source_dir / "package"])


def test_dict_gives_files_new_names(source_dir: Path) -> None:
    assert sorted(
        files.collect({"in/train.csv": source_dir / "data.csv", "p": str(source_dir / "package" / "deep")})
    ) == [
        "in/train.csv",
        "p/code.py",
    ]


def test_equal_contents_are_stored_once_and_linked_under_both_names(source_dir: Path, tmp_path: Path) -> None:
    pack, work = tmp_path / "pack", tmp_path / "work"
    hashes = files.put(pack, files.collect([source_dir / "data.csv", source_dir / "same.csv", source_dir / "package"]))
    files.link_files(pack, hashes, work)
    assert hashes["data.csv"] == hashes["same.csv"]
    assert len(list((pack / manifest.BLOBS).iterdir())) == 3
    assert (work / "same.csv").read_text() == "1,2\n"
    assert (work / "package" / "deep" / "code.py").read_text() == "X = 1\n"


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "", "a/../../b", "."])
def test_name_outside_the_working_directory_is_rejected(source_dir: Path, name: str) -> None:
    with pytest.raises(BadFiles):
        files.collect({name: source_dir / "data.csv"})


def test_two_files_of_one_name_are_rejected(source_dir: Path) -> None:
    (source_dir / "package" / "data.csv").write_text("another")
    with pytest.raises(BadFiles, match=r"two files in files= have the name data\.csv"):
        files.collect([source_dir / "data.csv", source_dir / "package" / "data.csv"])


def test_missing_file_and_special_file_are_rejected(source_dir: Path) -> None:
    os.mkfifo(source_dir / "pipe")
    for name in ("nothing.csv", "pipe"):
        with pytest.raises(BadFiles, match=name):
            files.collect([source_dir / name])
    with pytest.raises(BadFiles, match="one path"):
        files.collect(str(source_dir / "data.csv"))  # type: ignore[arg-type]


@pytest.fixture
def linked(source_dir: Path, tmp_path: Path) -> tuple[dict[str, str], Path]:
    hashes = files.put(tmp_path / "pack", files.collect([source_dir / "data.csv", source_dir / "package"]))
    files.link_files(tmp_path / "pack", hashes, tmp_path / "work")
    return hashes, tmp_path / "work"


def test_unmodified_files_are_accepted(linked: tuple[dict[str, str], Path]) -> None:
    files.verify(*linked)


def test_modified_blob_is_rejected(linked: tuple[dict[str, str], Path], tmp_path: Path) -> None:
    hashes, work = linked
    blob = tmp_path / "pack" / manifest.BLOBS / hashes["package/deep/code.py"]
    blob.chmod(0o600)
    blob.write_text("X = 2\n")
    with pytest.raises(PackDamaged, match=r"code\.py of files= does not match its hash") as raised:
        files.verify(hashes, work)
    assert raised.value.where == str(work / "package" / "deep" / "code.py")


def test_missing_and_replaced_file_are_rejected(linked: tuple[dict[str, str], Path]) -> None:
    hashes, work = linked
    (work / "data.csv").unlink()
    with pytest.raises(PackDamaged, match=r"data\.csv of files= cannot be read"):
        files.verify(hashes, work)
    (work / "data.csv").write_text("3,4\n")
    with pytest.raises(PackDamaged, match=r"data\.csv of files= does not match its hash"):
        files.verify(hashes, work)


def test_file_name_that_is_not_utf_8_is_rejected(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).touch()
    with pytest.raises(BadFiles, match="not UTF-8"):
        files.collect([tmp_path])
