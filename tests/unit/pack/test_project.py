"""Projects: which files are sent, how they are listed, and how they are written on another machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from shoal.errors import BadFiles, PackDamaged
from shoal.pack import project
from shoal.pack.project import Project, ProjectFile


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    for name, text in {
        "train.py": "import lib.model",
        "lib/model.py": "x = 1",
        "lib/__pycache__/model.pyc": "junk",
        ".venv/bin/python": "large",
        "data/big.bin": "0" * 5000,
        "notes.txt": "hello",
    }.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (directory / "run.sh").write_text("#!/bin/sh")
    (directory / "run.sh").chmod(0o755)
    return directory


def test_all_files_except_caches_are_sent_without_git(root: Path) -> None:
    assert set(project.find_files(root)) == {"train.py", "lib/model.py", "data/big.bin", "notes.txt", "run.sh"}


def test_only_files_that_could_be_committed_are_sent_with_git(root: Path) -> None:
    (root / ".gitignore").write_text("data/\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    subprocess.run(["git", "-C", str(root), "add", "train.py"], check=True)
    assert set(project.find_files(root)) == {".gitignore", "train.py", "lib/model.py", "notes.txt", "run.sh"}
    assert set(project.find_files(root / "lib")) == {"model.py"}, "below a directory of the repository"


def test_deleted_file_in_git_is_not_sent(root: Path) -> None:
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    subprocess.run(["git", "-C", str(root), "add", "notes.txt"], check=True)
    (root / "notes.txt").unlink()
    assert "notes.txt" not in project.find_files(root)


def test_files_of_a_submodule_are_sent(root: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    (library / "deep").mkdir(parents=True)
    (library / "deep" / "layers.py").write_text("y = 2")
    (library / "junk.bin").write_text("generated")
    (library / ".gitignore").write_text("*.bin\n")
    for path in (library, root):
        subprocess.run(["git", "init", "-q", str(path)], check=True)
    subprocess.run(["git", "-C", str(library), "add", "."], check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(library), *author, "commit", "-qm", "one"], check=True)
    added = ["-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library), "vendor/library"]
    subprocess.run(["git", "-C", str(root), *added], check=True)
    (root / "vendor" / "library" / "junk.bin").write_text("generated")
    names = {name for name in project.find_files(root) if name.startswith("vendor")}
    assert names == {"vendor/library/.gitignore", "vendor/library/deep/layers.py"}
    subprocess.run(["git", "-C", str(root), "submodule", "--quiet", "deinit", "-f", "vendor/library"], check=True)
    assert "train.py" in project.find_files(root), "an empty submodule does no harm"


def test_files_of_a_nested_clone_are_sent(root: Path) -> None:
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    subprocess.run(["git", "init", "-q", str(root / "lib")], check=True)
    assert "lib/model.py" in project.find_files(root)


@pytest.mark.parametrize("git", [False, True])
def test_links_to_directories_of_the_project_are_sent_as_copies(root: Path, tmp_path: Path, git: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "huge.bin").touch()
    (root / "package").mkdir()
    for link, target in {
        "package/inner": "../lib",
        "again": ".",
        "lib/up": "..",
        "far": "../elsewhere",
        "first.py": "train.py",
        "gone": "nowhere",
    }.items():
        (root / link).symlink_to(target)
    if git:
        subprocess.run(["git", "init", "-q", str(root)], check=True)
        (root / ".gitignore").write_text(".venv\n__pycache__\n")
    usual = {"train.py", "first.py", "lib/model.py", "data/big.bin", "notes.txt", "run.sh"}
    assert set(project.find_files(root)) - {".gitignore"} == usual | {"package/inner/model.py"}
    assert set(project.walk(root)) - {".gitignore"} == usual | {"package/inner/model.py"}


def test_name_that_is_not_utf_8_is_rejected_unless_ignored(root: Path) -> None:
    strange = root / os.fsdecode(b"caf\xe9.txt")
    strange.touch()
    with pytest.raises(BadFiles, match="not UTF-8") as raised:
        project.find_files(root)
    assert ".shoalignore" in raised.value.do
    str(raised.value).encode()
    for pattern in (b"caf*.txt", b"caf\xe9.txt"):
        (root / ".shoalignore").write_bytes(pattern)
        assert "train.py" in project.find_files(root)
    (root / "a name\nof two lines").touch()
    _, data = project.encode(project.hash_files(project.find_files(root))[0])
    assert "a name\nof two lines" in {entry.path for entry in project.decode(data).files}


def test_all_files_are_sent_if_git_ignores_the_whole_project(root: Path) -> None:
    subprocess.run(["git", "init", "-q", str(root.parent)], check=True)
    (root.parent / ".gitignore").write_text("*\n")
    assert {"train.py", "lib/model.py"} <= set(project.find_files(root)), "a home that is a repository of settings"
    assert ".venv/bin/python" not in project.find_files(root)


def test_failure_of_git_is_reported_instead_of_sending_ignored_files(root: Path) -> None:
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / ".git" / "config").write_text("[broken")
    with pytest.raises(BadFiles, match="Git") as raised:
        project.find_files(root / "lib")
    assert "config" in raised.value.why


@pytest.mark.parametrize(
    ("patterns", "ignored"),
    [
        ("data\n", {"data/big.bin"}),
        ("*.bin  \n# a comment\n\n", {"data/big.bin"}),
        ("lib/*.py\nnotes.txt", {"lib/model.py", "notes.txt"}),
        ("/data/", {"data/big.bin"}),
    ],
)
def test_files_in_shoalignore_are_not_sent(root: Path, patterns: str, ignored: set[str]) -> None:
    before = set(project.find_files(root))
    (root / ".shoalignore").write_text(patterns)
    assert set(project.find_files(root)) == (before | {".shoalignore"}) - ignored


def test_size_and_largest_files_are_described_and_the_limit_is_enforced(root: Path) -> None:
    files = project.find_files(root)
    assert project.describe(files).startswith("5 files, 4.9 KiB; the largest: data/big.bin 4.9 KiB, ")
    project.check_size(files, 6000)
    with pytest.raises(BadFiles, match="too large") as raised:
        project.check_size(files, 4000)
    assert "data/big.bin" in raised.value.what
    assert ".shoalignore" in raised.value.do


def test_project_is_written_back_from_its_blobs_and_named_by_its_contents(root: Path, tmp_path: Path) -> None:
    sent, paths = project.hash_files(project.find_files(root))
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for digest, path in paths.items():
        (blobs / digest).write_bytes(path.read_bytes())
    name, data = project.encode(sent)
    project.write_files(project.decode(data), blobs, tmp_path / "copy")
    for entry in sent.files:
        assert (tmp_path / "copy" / entry.path).read_bytes() == (root / entry.path).read_bytes()
    assert (tmp_path / "copy" / "run.sh").stat().st_mode & 0o100
    assert not (tmp_path / "copy" / "train.py").stat().st_mode & 0o077, "readable by its owner only"
    project.write_files(sent, blobs, tmp_path / "copy")
    assert not list(tmp_path.glob("*.part"))
    (root / "notes.txt").write_text("hello!")
    assert project.encode(project.hash_files(project.find_files(root))[0])[0] != name


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../b", "", "a\0b"])
def test_path_outside_the_project_is_rejected(path: str) -> None:
    _, data = project.encode(Project((ProjectFile(path, "0" * 64, 1),)))
    with pytest.raises(PackDamaged):
        project.decode(data)


@pytest.mark.parametrize("digest", ["../../secret", "/etc/passwd", "", "0" * 63])
def test_invalid_hash_in_a_project_is_rejected(digest: str) -> None:
    _, data = project.encode(Project((ProjectFile("train.py", digest, 1),)))
    with pytest.raises(PackDamaged, match="invalid hash"):
        project.decode(data)


@pytest.mark.parametrize("data", [b'"\xff"', b"[" * 100_000, b"{", b"null"])
def test_blob_that_is_no_project_is_called_damaged(data: bytes) -> None:
    with pytest.raises(PackDamaged):
        project.decode(data)
