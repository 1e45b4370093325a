"""Requirements files as they travel: with all that they refer to on this disk, and nothing that only is here; pure but
for reading files."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import BadEnvironment

MAIN_FILE = "requirements.txt"
_REFERS = re.compile(r"(-r|--requirement|-c|--constraint)(?:\s+|=|(?<=-[rc]))(\S+)\s*(?:#.*)?")
_EDITABLE = re.compile(r"(-e|--editable)\b")
_NEAR = re.compile(r"(-f|--find-links)[ =]*(?![/~=\s]|\w+://)")
_FILES = (".whl", ".tar.gz", ".zip", ".tar.bz2")
_ANEW = "make it anew, or give a requirements.txt"
_WHEELS = "build a wheel of it (pip wheel --no-deps) and name that, or leave it out if it is the project itself"


class _File(msgspec.Struct, frozen=True):
    hashes: Mapping[str, str]


class _Package(msgspec.Struct, frozen=True):
    name: str
    version: str = ""
    marker: str = ""
    wheels: tuple[_File, ...] = ()
    sdist: _File | None = None


class _Lock(msgspec.Struct, frozen=True):
    """What counts here of a pylock.toml; there is more in it."""

    packages: tuple[_Package, ...]


def gather(path: Path) -> dict[str, Path | bytes]:
    """The file and whatever it includes, each under a name in one folder; what it names on this disk comes along."""
    if path.name.endswith(".toml"):
        return {MAIN_FILE: from_lock(_load(path), str(path)).encode()}
    found: dict[str, Path | bytes] = {}
    _take(path, MAIN_FILE, found, {})
    return found


def _take(path: Path, name: str, found: dict[str, Path | bytes], names: dict[Path, str]) -> None:
    names[path.resolve()] = name
    found[name] = b""
    lines = [_line(line, path, found, names) for line in join_continued_lines(_text(path))]
    found[name] = ("\n".join(lines) + "\n").encode()


def join_continued_lines(text: str) -> Iterator[str]:
    """Its lines, those that a backslash goes on with made one."""
    kept = ""
    for line in text.splitlines():
        kept += line
        if not line.endswith("\\") or line.lstrip().startswith("#"):
            yield kept
            kept = ""
        else:
            kept = kept[:-1] + " "
    if kept:
        yield kept


def _line(line: str, path: Path, found: dict[str, Path | bytes], names: dict[Path, str]) -> str:
    words = line.strip()
    if not words or words.startswith("#"):
        return words
    if _EDITABLE.match(words) or _NEAR.match(words):
        raise _local(path, words)
    refers = _REFERS.fullmatch(words)
    if refers is not None:
        return words if "://" in refers[2] else f"{refers[1]} {_included(path.parent / refers[2], found, names)}"
    named = words.split()[0]
    if named.startswith("-") or "://" in words or (not named.startswith((".", "/", "~")) and "/" not in named):
        return words
    source = (path.parent / Path(named).expanduser()).resolve()
    if not named.endswith(_FILES) or not source.is_file():
        raise _local(path, words)
    found[source.name] = source
    return words.replace(named, f"./{source.name}", 1)


def _included(path: Path, found: dict[str, Path | bytes], names: dict[Path, str]) -> str:
    known = names.get(path.resolve())
    if known is None:
        known = f"included-{len(names)}.txt"
        _take(path, known, found, names)
    return known


def from_lock(lock: Mapping[str, Any], where: str = "") -> str:
    """The requirements that a pylock.toml (PEP 751) stands for, each with its hashes; pure.

    Where packages are fetched from is left to pip and its configuration on the machine.
    """
    if not str(lock.get("lock-version", "")).startswith("1."):
        raise BadEnvironment(
            "this is no lock that Shoal can read", where=where, why="it is not of lock-version 1.x", do=_ANEW
        )
    try:
        packages = msgspec.convert(lock, _Lock).packages
    except msgspec.ValidationError as error:
        raise BadEnvironment("the lock is damaged", where=where, why=str(error), do=_ANEW) from error
    lines = []
    for package in packages:
        files = [*package.wheels, *([package.sdist] if package.sdist is not None else ())]
        hashes = sorted({f"--hash=sha256:{one.hashes['sha256']}" for one in files if "sha256" in one.hashes})
        if not package.version or not hashes:
            raise BadEnvironment(
                f"{package.name} of the lock is not one of an index",
                where=where,
                why="it is a folder, a repository or an archive of its own",
                do="lock wheels of an index, or give a requirements.txt",
            )
        marker = f" ; {package.marker}" if package.marker else ""
        lines.append(f"{package.name}=={package.version}{marker} {' '.join(hashes)}")
    return "\n".join(lines) + "\n"


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise BadEnvironment("the lock cannot be read", where=str(path), why=str(error)) from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise BadEnvironment(f"{path} cannot be read", why=why or str(error), do="correct environment") from error


def _local(path: Path, words: str) -> BadEnvironment:
    return BadEnvironment(
        f"{words!r} cannot be sent to other machines", where=str(path), why="it is a folder of this disk", do=_WHEELS
    )
