"""The user's project, as it travels to machines that do not see this disk: which files, and what they hold."""

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

from shoal.errors import BadFiles, PackDamaged

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
_PIECE_BYTES = 1 << 20


class ProjectFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: where it belongs below the project's directory, and the hash of what it holds."""

    path: str
    digest: str
    bytes: int
    executable: bool = False


class Project(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All files of a project, by path. Its own hash is the project's name."""

    files: tuple[ProjectFile, ...]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)


def find_files(root: Path) -> dict[str, Path]:
    """The files to send: those that Git would commit, where there is Git, and otherwise all but what is made anew.

    A file `.shoalignore` leaves out more, with a pattern on each line.
    """
    patterns = _patterns(root)
    names = sorted(follow_links(root, list(_names(root))))
    found = {name: root / name for name in names if not any(_matches(name, pattern) for pattern in patterns)}
    check_names(found, f"rename it, or name it in {IGNORES}")
    return found


def check_names(names: Iterable[str], do: str) -> None:
    """Refuse a name that cannot be written down: on this system they are bytes, and may be anything."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise BadFiles(f"a file with the name {name!r} cannot be sent", why="it is not UTF-8", do=do) from error


def describe(files: Mapping[str, Path]) -> str:
    """How much it is, and what weighs most, in one line."""
    sizes = sorted(((path.stat().st_size, name) for name, path in files.items()), reverse=True)
    whole = sum(size for size, _ in sizes)
    largest = ", ".join(f"{name} {_size(size)}" for size, name in sizes[:LARGEST])
    return f"{len(sizes)} files, {_size(whole)}" + (f"; the largest: {largest}" if largest else "")


def check_size(files: Mapping[str, Path], limit_bytes: int) -> None:
    """Refuse what is too much to send."""
    whole = sum(path.stat().st_size for path in files.values())
    if whole > limit_bytes:
        raise BadFiles(
            f"the project is too large to send: {describe(files)}",
            why=f"at most {_size(limit_bytes)} are sent",
            do=f"name what is not needed in {IGNORES}, put data where all machines find it, or set ship_limit_mb",
        )


def hash_files(files: Mapping[str, Path]) -> tuple[Project, dict[str, Path]]:
    """The project as it travels, and where each of its contents is to be read."""
    entries, contents = [], {}
    for name, path in files.items():
        digest = hash_file(path)
        status = path.stat()
        entries.append(ProjectFile(name, digest, status.st_size, bool(status.st_mode & 0o100)))
        contents[digest] = path
    return Project(tuple(entries)), contents


def encode(project: Project) -> tuple[str, bytes]:
    """The project's name and what is stored under it."""
    data = msgspec.json.encode(project)
    return hashlib.sha256(data).hexdigest(), data


def decode(data: bytes, where: str = "") -> Project:
    """A project from what is stored; its paths stay below its directory, and its contents are those of the cache."""
    try:
        project = msgspec.json.decode(data, type=Project)
    except msgspec.DecodeError as error:
        raise PackDamaged("the project of this run cannot be read", where=where, why=str(error)) from error
    for entry in project.files:
        path = PurePosixPath(entry.path)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in entry.path:
            raise PackDamaged(f"a file of the project is called {entry.path!r}", where=where)
        if not DIGEST.fullmatch(entry.digest):
            raise PackDamaged(f"{entry.path} of the project has no hash", where=where, why=repr(entry.digest[:80]))
    return project


def write_files(project: Project, blobs: Path, where: Path) -> None:
    """Copy every file to its place; whoever finds the directory finds all of it."""
    part = where.with_name(f"{where.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True, mode=0o700)
    for entry in project.files:
        path = part / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(blobs / entry.digest, path)
        path.chmod(0o700 if entry.executable else 0o600)
    try:
        part.replace(where)
    except OSError:
        # Somebody else was faster; what there is came from the same contents.
        shutil.rmtree(part, ignore_errors=True)
        if not where.is_dir():
            raise


def hash_file(path: Path) -> str:
    """The hash of what a file holds."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        raise BadFiles(f"{path} cannot be read", why=error.strerror or str(error)) from error
    return digest.hexdigest()


def _names(root: Path) -> Iterator[str]:
    """All that may travel; of a repository in a repository (a submodule), Git lists the directory only."""
    known = _known_to_git(root)
    for name in list_names(root) if known is None else known:
        path = root / name
        if (path / ".git").exists() and not path.is_symlink():
            yield from (f"{name.rstrip('/')}/{inner}" for inner in _names(path))
        else:
            yield name


def _known_to_git(root: Path) -> list[str] | None:
    """What is committed or could be, relative to `root`; None if Git has no say here, or ignores all of it."""
    argv = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(argv, capture_output=True, check=False, env={**os.environ, "LC_ALL": "C"})
    except FileNotFoundError:
        return None
    if NO_REPOSITORY in done.stderr:
        return None
    if done.returncode != 0:
        # Without its word, what it is told to ignore would be sent: data, and secrets.
        raise BadFiles(
            "Git does not say which files belong to the project",
            where=str(root),
            why=done.stderr.decode(errors="replace").strip(),
            do=f"mend what git -C {root} status says; --set ship=never sends nothing",
        )
    names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    return [name for name in names if not any(_matches(name, pattern) for pattern in NEVER)] or None


def walk(root: Path) -> Iterator[str]:
    """All files below a directory but what is made anew, by their paths in it."""
    return follow_links(root, list(list_names(root)))


def list_names(root: Path, never: Collection[str] = NEVER) -> Iterator[str]:
    """All that is no directory below one, links to directories included, but what has a name that never travels."""
    for directory, folders, files in os.walk(root):
        folders[:] = [one for one in folders if not any(fnmatch.fnmatch(one, pattern) for pattern in never)]
        for name in (*files, *(one for one in folders if Path(directory, one).is_symlink())):
            if not any(fnmatch.fnmatch(name, pattern) for pattern in never):
                yield Path(directory, name).relative_to(root).as_posix()


def follow_links(root: Path, names: Collection[str]) -> Iterator[str]:
    """All files of these names, and once more those that a link to a directory among them leads to.

    Links do not travel, and what one leads to outside of `root` is not the project's.
    """
    yield from (name for name in names if (root / name).is_file())
    for link in (name for name in names if (root / name).is_symlink() and (root / name).is_dir()):
        target = PurePosixPath(os.path.relpath((root / link).resolve(), root.resolve()))
        if not PurePosixPath(link).is_relative_to(target):
            found = [one for one in map(PurePosixPath, names) if one.is_relative_to(target) and (root / one).is_file()]
            yield from (f"{link}/{one.relative_to(target)}" for one in found)


def _patterns(root: Path) -> list[str]:
    try:
        lines = os.fsdecode((root / IGNORES).read_bytes()).splitlines()
    except FileNotFoundError:
        return []
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern means a file: its path, any folder above it, or the last part of either."""
    pattern = pattern.rstrip("/")
    parts = PurePosixPath(name).parts
    above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    if "/" in pattern:
        return any(fnmatch.fnmatch(path, pattern.lstrip("/")) for path in above)
    return any(fnmatch.fnmatch(part, pattern) for part in parts)


def _size(count: float) -> str:
    units = ("bytes", "KiB", "MiB", "GiB")
    power = 0
    while count >= 1024 and power < len(units) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.1f} {units[power]}" if power else f"{count:.0f} bytes"
