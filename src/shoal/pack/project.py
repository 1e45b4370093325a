"""Project of the user: the directory of a script, as it is sent to machines that do not see this disk.

Which files belong to it is Git's decision where the directory is in a repository: committed files, and those that could
be. Elsewhere it is every file except caches and environments (`NEVER`). A file `.shoalignore` excludes more. Links are
not sent: a link to a file is sent as that file, a link to a directory of the project as copies of its files, and a link
to a directory elsewhere is skipped.

A `Project` lists paths and hashes; its own hash is its name. The contents travel as blobs under their hashes, so a
second run sends only the files that changed.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from shoal.core.nouns import counted
from shoal.errors import BadFiles, PackDamaged
from shoal.pack import manifest

IGNORES = ".shoalignore"
NEVER = (
    ".git",
    ".shoal",
    "__pycache__",
    ".venv",
    "venv",
    "node_modules",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    "*.pyc",
)
NO_REPOSITORY = b"not a git repository (or any"
DIGEST = re.compile(r"[0-9a-f]{64}")
LARGEST = 5


class ProjectFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """File of a project: its path relative to the project's directory, and the SHA-256 of its contents."""

    path: str
    digest: str
    bytes: int
    executable: bool = False


class Project(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All files of a project."""

    files: tuple[ProjectFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def find_files(root: Path) -> dict[str, Path]:
    """Return the files to send, by name; raise BadFiles if Git fails or a name is not UTF-8.

    `.shoalignore` holds one pattern per line.
    """
    patterns = _patterns(root)
    names = sorted(follow_links(root, list(_names(root))))
    files = {name: root / name for name in names if not any(_matches(name, pattern) for pattern in patterns)}
    check_names(files, f"rename it, or list it in {IGNORES}")
    return files


def check_names(names: Iterable[str], do: str) -> None:
    """Raise BadFiles for a name that is not UTF-8: on Linux a file name is any sequence of bytes."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise BadFiles(f"invalid file name {name!r}", why="it is not UTF-8", do=do) from error


def describe(files: Mapping[str, Path]) -> str:
    """Return one line with the number of files, their total size and the largest ones."""
    sizes = sorted(((path.stat().st_size, name) for name, path in files.items()), reverse=True)
    total = sum(size for size, _ in sizes)
    largest = ", ".join(f"{name} {_size(size)}" for size, name in sizes[:LARGEST])
    return f"{counted(len(sizes), 'file')}, {_size(total)}" + (f"; the largest: {largest}" if largest else "")


def check_size(files: Mapping[str, Path], limit_bytes: int) -> None:
    """Raise BadFiles if the files are larger than the limit in total."""
    total = sum(path.stat().st_size for path in files.values())
    if total > limit_bytes:
        raise BadFiles(
            f"the project is too large to send: {describe(files)}",
            why=f"the limit is {_size(limit_bytes)}",
            do=f"list files that are not needed in {IGNORES}, put data where all machines see it, or set ship_limit_mb",
        )


def hash_files(files: Mapping[str, Path]) -> tuple[Project, dict[str, Path]]:
    """Return the project with the hashes of its files, and the local path of each hash."""
    entries, paths = [], {}
    for name, path in files.items():
        digest = hash_file(path)
        status = path.stat()
        entries.append(ProjectFile(name, digest, status.st_size, bool(status.st_mode & 0o100)))
        paths[digest] = path
    return Project(tuple(entries)), paths


def encode(project: Project) -> tuple[str, bytes]:
    """Return the name of a project and the blob to store under it."""
    data = msgspec.json.encode(project)
    return hashlib.sha256(data).hexdigest(), data


def decode(data: bytes, where: str = "") -> Project:
    """Return the project in a blob; raise PackDamaged for paths outside its directory and for invalid hashes."""
    try:
        project = msgspec.json.decode(data, type=Project)
    except (ValueError, RecursionError) as error:  # not only msgspec's own: also text that is not UTF-8
        raise PackDamaged("the project of this run cannot be read", where=where, why=str(error)) from error
    for entry in project.files:
        path = PurePosixPath(entry.path)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in entry.path:
            raise PackDamaged(f"invalid file name {entry.path!r} in the project", where=where)
        if not DIGEST.fullmatch(entry.digest):
            raise PackDamaged(f"invalid hash of {entry.path} in the project", where=where, why=repr(entry.digest[:80]))
    return project


def write_files(project: Project, blobs: Path, directory: Path) -> None:
    """Create `directory` with all files of a project from their blobs, in one rename; raise OSError."""
    part = directory.with_name(f"{directory.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True, mode=0o700)
    for entry in project.files:
        path = part / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(blobs / entry.digest, path)
        path.chmod(0o700 if entry.executable else 0o600)
    try:
        part.replace(directory)
    except OSError:
        # Another process has created it meanwhile, from the same blobs.
        shutil.rmtree(part, ignore_errors=True)
        if not directory.is_dir():
            raise


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's contents; raise BadFiles if it cannot be read."""
    try:
        return manifest.hash_file(path)
    except OSError as error:
        raise BadFiles(f"{path} cannot be read", why=error.strerror or str(error)) from error


def _names(root: Path) -> Iterator[str]:
    """Yield every name that may be sent; nested repositories, which Git lists as one name, are expanded."""
    git_names = _names_in_git(root)
    for name in list_names(root) if git_names is None else git_names:
        path = root / name
        if (path / ".git").exists() and not path.is_symlink():
            yield from (f"{name.rstrip('/')}/{inner}" for inner in _names(path))
        else:
            yield name


def _names_in_git(root: Path) -> list[str] | None:
    """Return the names that are committed or could be; None outside a repository, or if Git ignores all of `root`."""
    argv = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        result = subprocess.run(argv, capture_output=True, check=False, env={**os.environ, "LC_ALL": "C"})
    except FileNotFoundError:
        return None
    if NO_REPOSITORY in result.stderr:
        return None
    if result.returncode != 0:
        # Without Git's answer, ignored files would be sent: large data, and secrets.
        raise BadFiles(
            "Git failed to list the files of the project",
            where=str(root),
            why=result.stderr.decode(errors="replace").strip(),
            do=f"fix the error that git -C {root} status shows, or send nothing with --set ship=never",
        )
    names = [os.fsdecode(name) for name in result.stdout.split(b"\0") if name]
    return [name for name in names if not any(_matches(name, pattern) for pattern in NEVER)] or None


def walk(root: Path) -> Iterator[str]:
    """Yield the relative paths of all files in a directory, except caches and environments (`NEVER`)."""
    return follow_links(root, list(list_names(root)))


def list_names(root: Path, never: Collection[str] = NEVER) -> Iterator[str]:
    """Yield the relative paths of all files and all links to directories, except names that match `never`."""
    for directory, folders, files in os.walk(root):
        folders[:] = [folder for folder in folders if not any(fnmatch.fnmatch(folder, pattern) for pattern in never)]
        for name in (*files, *(folder for folder in folders if Path(directory, folder).is_symlink())):
            if not any(fnmatch.fnmatch(name, pattern) for pattern in never):
                yield Path(directory, name).relative_to(root).as_posix()


def follow_links(root: Path, names: Collection[str]) -> Iterator[str]:
    """Yield all files among `names`, and again below each link to a directory the files of that directory.

    Files outside `root` do not belong to the project, so links that leave it are skipped.
    """
    yield from (name for name in names if (root / name).is_file())
    for link in (name for name in names if (root / name).is_symlink() and (root / name).is_dir()):
        target = PurePosixPath(os.path.relpath((root / link).resolve(), root.resolve()))
        if not PurePosixPath(link).is_relative_to(target):
            paths = [
                path for path in map(PurePosixPath, names) if path.is_relative_to(target) and (root / path).is_file()
            ]
            yield from (f"{link}/{path.relative_to(target)}" for path in paths)


def _patterns(root: Path) -> list[str]:
    try:
        lines = os.fsdecode((root / IGNORES).read_bytes()).splitlines()
    except FileNotFoundError:
        return []
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a file's path, the path of a folder above it, or the last part of either."""
    pattern = pattern.rstrip("/")
    parts = PurePosixPath(name).parts
    paths = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    if "/" in pattern:
        return any(fnmatch.fnmatch(path, pattern.lstrip("/")) for path in paths)
    return any(fnmatch.fnmatch(part, pattern) for part in parts)


def _size(count: float) -> str:
    units = ("bytes", "KiB", "MiB", "GiB")
    power = 0
    while count >= 1024 and power < len(units) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.1f} {units[power]}" if power else f"{count:.0f} bytes"
