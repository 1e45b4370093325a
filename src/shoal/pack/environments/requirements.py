"""Requirements files that machines can install: rewritten to need nothing else from this disk.

`-r` and `-c` lines are followed, and included files renamed so that all fit into one folder. Local wheels and source
archives are sent along. Local directories cannot be, and raise BadEnvironment. A `pylock.toml` (PEP 751) is converted
to requirements with hashes. Nothing is resolved or downloaded here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import BadEnvironment

MAIN_FILE = "requirements.txt"
_INCLUDE = re.compile(r"(-r|--requirement|-c|--constraint)(?:\s+|=|(?<=-[rc]))(\S+)\s*(?:#.*)?")
_EDITABLE = re.compile(r"(-e|--editable)\b")
_LOCAL_LINKS = re.compile(r"(-f|--find-links)[ =]*(?![/~=\s]|\w+://)")
_PACKAGE_FILES = (".whl", ".tar.gz", ".zip", ".tar.bz2")
_LOCK_AGAIN = "create the lock again, or use a requirements.txt"
_WHEELS = "build a wheel of it (pip wheel --no-deps) and name that, or leave it out if it is the project itself"


class _LockedFile(msgspec.Struct, frozen=True):
    hashes: Mapping[str, str]


class _Package(msgspec.Struct, frozen=True):
    name: str
    version: str = ""
    marker: str = ""
    wheels: tuple[_LockedFile, ...] = ()
    sdist: _LockedFile | None = None


class _Lock(msgspec.Struct, frozen=True):
    """Fields of a pylock.toml that are used here."""

    packages: tuple[_Package, ...]


def gather(path: Path) -> dict[str, Path | bytes]:
    """Return a requirements file and all local files that it refers to, each under its name in one flat folder."""
    if path.name.endswith(".toml"):
        return {MAIN_FILE: from_lock(_load(path), str(path)).encode()}
    files: dict[str, Path | bytes] = {}
    _add_file(path, MAIN_FILE, files, {})
    return files


def _add_file(path: Path, name: str, files: dict[str, Path | bytes], names: dict[Path, str]) -> None:
    """Add a rewritten requirements file, and the files that it refers to, to `files`; `names` holds those added."""
    # The name is registered before the lines are read, because files may include each other.
    names[path.resolve()] = name
    files[name] = b""
    lines = [_rewrite(line, path, files, names) for line in join_continued_lines(_text(path))]
    files[name] = ("\n".join(lines) + "\n").encode()


def join_continued_lines(text: str) -> Iterator[str]:
    """Yield the lines of a text, with those that end in a backslash joined to the next."""
    joined = ""
    for line in text.splitlines():
        joined += line
        if not line.endswith("\\") or line.lstrip().startswith("#"):
            yield joined
            joined = ""
        else:
            joined = joined[:-1] + " "
    if joined:
        yield joined


def _rewrite(line: str, path: Path, files: dict[str, Path | bytes], names: dict[Path, str]) -> str:
    words = line.strip()
    if not words or words.startswith("#"):
        return words
    if _EDITABLE.match(words) or _LOCAL_LINKS.match(words):
        raise _local(path, words)
    include = _INCLUDE.fullmatch(words)
    if include is not None:
        return words if "://" in include[2] else f"{include[1]} {_include(path.parent / include[2], files, names)}"
    requirement = words.split()[0]
    is_path = requirement.startswith((".", "/", "~")) or "/" in requirement
    if requirement.startswith("-") or "://" in words or not is_path:
        return words
    source = (path.parent / Path(requirement).expanduser()).resolve()
    if not requirement.endswith(_PACKAGE_FILES) or not source.is_file():
        raise _local(path, words)
    files[source.name] = source
    return words.replace(requirement, f"./{source.name}", 1)


def _include(path: Path, files: dict[str, Path | bytes], names: dict[Path, str]) -> str:
    """Return the new name of an included file; add the file first if it is new."""
    name = names.get(path.resolve())
    if name is None:
        name = f"included-{len(names)}.txt"
        _add_file(path, name, files, names)
    return name


def from_lock(lock: Mapping[str, Any], where: str = "") -> str:
    """Return the requirements, with hashes, that a parsed pylock.toml (PEP 751) stands for.

    Its URLs are dropped: pip and its configuration on the machine decide which index to use.
    """
    if not str(lock.get("lock-version", "")).startswith("1."):
        raise BadEnvironment(
            "unsupported lock file", where=where, why="only lock-version 1.x is supported", do=_LOCK_AGAIN
        )
    try:
        packages = msgspec.convert(lock, _Lock).packages
    except msgspec.ValidationError as error:
        raise BadEnvironment("invalid lock file", where=where, why=str(error), do=_LOCK_AGAIN) from error
    lines = []
    for package in packages:
        files = [*package.wheels, *([package.sdist] if package.sdist is not None else ())]
        hashes = sorted({f"--hash=sha256:{file.hashes['sha256']}" for file in files if "sha256" in file.hashes})
        if not package.version or not hashes:
            raise BadEnvironment(
                f"package {package.name} of the lock file does not come from an index",
                where=where,
                why="it is a directory, a repository or a single archive",
                do="lock packages of an index, or use a requirements.txt",
            )
        marker = f" ; {package.marker}" if package.marker else ""
        lines.append(f"{package.name}=={package.version}{marker} {' '.join(hashes)}")
    return "\n".join(lines) + "\n"


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise BadEnvironment("invalid lock file", where=str(path), why=str(error)) from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise BadEnvironment(f"{path} cannot be read", why=why or str(error), do="correct environment") from error


def _local(path: Path, words: str) -> BadEnvironment:
    return BadEnvironment(
        f"{words!r} cannot be sent to other machines",
        where=str(path),
        why="it is a directory of this disk, or a missing file",
        do=_WHEELS,
    )
