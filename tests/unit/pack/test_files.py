"""Files are found by members under the names that they were given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.errors import BadFiles, PackDamaged
from shoal.pack import files, manifest


@pytest.fixture
def given(tmp_path: Path) -> Path:
    root = tmp_path / "given"
    (root / "package" / "deep").mkdir(parents=True)
    (root / "package" / "__pycache__").mkdir()
    (root / "data.csv").write_text("1,2\n")
    (root / "same.csv").write_text("1,2\n")
    (root / "package" / "__init__.py").write_text("")
    (root / "package" / "deep" / "code.py").write_text("X = 1\n")
    (root / "package" / "__pycache__" / "code.pyc").write_text("old")
    return root


def test_a_path_keeps_its_last_name_and_a_directory_its_shape(given: Path) -> None:
    found = files.collect([given / "data.csv", given / "package"])
    assert sorted(found) == ["data.csv", "package/__init__.py", "package/deep/code.py"]


def test_links_in_a_directory_travel_as_what_they_lead_to_unless_it_is_a_directory_elsewhere(given: Path) -> None:
    (given / "elsewhere").mkdir()
    (given / "elsewhere" / "huge.bin").touch()
    links = {"inner": "deep", "deep/up": "..", "far": "../elsewhere", "data.csv": "../data.csv"}
    for link, target in links.items():
        (given / "package" / link).symlink_to(target)
    found = files.collect([given / "package"])
    usual = ["package/__init__.py", "package/data.csv", "package/deep/code.py"]
    assert sorted(found) == [*usual, "package/inner/code.py"]
    (given / "package" / "gone").symlink_to("nowhere")
    with pytest.raises(BadFiles, match="gone"):
        files.collect([given / "package"])


def test_a_dict_names_them_anew(given: Path) -> None:
    assert sorted(files.collect({"in/train.csv": given / "data.csv", "p": str(given / "package" / "deep")})) == [
        "in/train.csv",
        "p/code.py",
    ]


def test_what_holds_the_same_is_kept_once_and_found_under_both_names(given: Path, tmp_path: Path) -> None:
    pack, work = tmp_path / "pack", tmp_path / "work"
    kept = files.put(pack, files.collect([given / "data.csv", given / "same.csv", given / "package"]))
    files.link_files(pack, kept, work)
    assert kept["data.csv"] == kept["same.csv"]
    assert len(list((pack / manifest.BLOBS).iterdir())) == 3
    assert (work / "same.csv").read_text() == "1,2\n"
    assert (work / "package" / "deep" / "code.py").read_text() == "X = 1\n"


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "", "a/../../b", "."])
def test_no_file_is_put_outside_of_the_working_directory(given: Path, name: str) -> None:
    with pytest.raises(BadFiles):
        files.collect({name: given / "data.csv"})


def test_two_files_of_one_name_are_refused(given: Path) -> None:
    (given / "package" / "data.csv").write_text("another")
    with pytest.raises(BadFiles, match="two of the files"):
        files.collect([given / "data.csv", given / "package" / "data.csv"])


def test_what_is_not_there_or_not_a_file_is_refused(given: Path) -> None:
    os.mkfifo(given / "pipe")
    for wrong in ("nothing.csv", "pipe"):
        with pytest.raises(BadFiles, match=wrong):
            files.collect([given / wrong])
    with pytest.raises(BadFiles, match="one path"):
        files.collect(str(given / "data.csv"))  # type: ignore[arg-type]


@pytest.fixture
def laid_out(given: Path, tmp_path: Path) -> tuple[dict[str, str], Path]:
    kept = files.put(tmp_path / "pack", files.collect([given / "data.csv", given / "package"]))
    files.link_files(tmp_path / "pack", kept, tmp_path / "work")
    return kept, tmp_path / "work"


def test_files_that_nobody_touched_are_taken(laid_out: tuple[dict[str, str], Path]) -> None:
    files.verify(*laid_out)


def test_a_file_whose_copy_was_changed_is_not_taken(laid_out: tuple[dict[str, str], Path], tmp_path: Path) -> None:
    kept, work = laid_out
    blob = tmp_path / "pack" / manifest.BLOBS / kept["package/deep/code.py"]
    blob.chmod(0o600)
    blob.write_text("X = 2\n")
    with pytest.raises(PackDamaged, match=r"code\.py is not what was given") as raised:
        files.verify(kept, work)
    assert raised.value.where == str(work / "package" / "deep" / "code.py")


def test_a_file_that_was_exchanged_is_not_taken(laid_out: tuple[dict[str, str], Path]) -> None:
    kept, work = laid_out
    (work / "data.csv").unlink()
    with pytest.raises(PackDamaged, match=r"data\.csv of files= cannot be read"):
        files.verify(kept, work)
    (work / "data.csv").write_text("3,4\n")
    with pytest.raises(PackDamaged, match=r"data\.csv is not what was given"):
        files.verify(kept, work)


def test_a_file_whose_name_is_not_utf_8_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).touch()
    with pytest.raises(BadFiles, match="not UTF-8"):
        files.collect([tmp_path])
