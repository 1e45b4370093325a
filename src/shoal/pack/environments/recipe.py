"""Recipe of an environment: its kind, and the files from which a machine builds it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.errors import BadEnvironment
from shoal.pack.environments import requirements, wheel

SHOAL_ONLY = "shoal"
REQUIREMENTS, ARCHIVE, PEX = "requirements", "archive", "pex"
ARCHIVES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar")
_EXPORT = "uv export --format requirements.txt -o requirements.txt"
KINDS = (
    f"a requirements file (.txt), a pylock.toml, a packed environment ({', '.join(ARCHIVES)}), a .pex, "
    f'or "{SHOAL_ONLY}"'
)


@dataclass(frozen=True, slots=True)
class PublishedEnvironment:
    """Environment that machines can fetch from the coordinator: the hashes of Shoal's wheel and of the recipe."""

    shoal: str
    recipe: str


class EnvironmentRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Instructions for a machine: `files` maps names to hashes, `made_of` identifies the environment that results.

    `shoal` and `pip` name wheels among the files; `pip` is empty if pip is not installed here, or not needed.
    """

    kind: str
    label: str
    files: Mapping[str, str]
    made_of: str
    shoal: str
    pip: str = ""


PLACEHOLDER = PublishedEnvironment("<shoal>", "<recipe>")


def kind_of(text: str) -> str:
    """Return the kind of an environment by its file name; raise BadEnvironment for an unknown one."""
    name = Path(text).name
    if text == SHOAL_ONLY or name.endswith(".txt") or (name.startswith("pylock.") and name.endswith(".toml")):
        return REQUIREMENTS
    if name.endswith(ARCHIVES):
        return ARCHIVE
    if name.endswith(".pex"):
        return PEX
    do = f"export it as requirements: {_EXPORT}" if name == "uv.lock" else f"use {KINDS}"
    raise BadEnvironment(
        f"unknown kind of environment: {name or repr(text)}", why="the kind is taken from the file name", do=do
    )


def resolve(text: str, base: Path, where: str = "") -> str:
    """Return the absolute path of an environment as shoal.toml names it, relative to `base`; "" and "shoal" stay."""
    if text in ("", SHOAL_ONLY):
        return text
    try:
        kind_of(text)
    except BadEnvironment as error:
        raise BadEnvironment(error.what, where=where, why=error.why, do=error.do) from None
    path = base / Path(text).expanduser()
    if not path.is_file():
        raise BadEnvironment(
            f"no such file: {text}",
            where=where,
            why=f"looked for {path}",
            do="correct environment, or create the file",
        )
    return str(path.resolve())


def publish(text: str, put: Callable[[Path | bytes], str]) -> PublishedEnvironment:
    """Store everything that machines need for an environment; `put` stores a file or bytes and returns its hash."""
    name, data = wheel.build_shoal_wheel()
    shoal = put(data)
    kind, label = kind_of(text), Path(text).name
    files: dict[str, str] = {}
    if kind == REQUIREMENTS:
        sources = requirements.gather(Path(text)) if text != SHOAL_ONLY else {requirements.MAIN_FILE: b""}
        files = {file: _put(put, source) for file, source in sources.items()}
    else:
        files = {label: _put(put, Path(text))}
    # Shoal is installed into an environment of requirements, but put beside a packed one.
    made_of = _hash(
        kind, *(part for pair in sorted(files.items()) for part in pair), *((shoal,) if kind == REQUIREMENTS else ())
    )
    pip = wheel.build_pip_wheel() if kind == REQUIREMENTS else None
    files |= {name: shoal, **({pip[0]: put(pip[1])} if pip is not None else {})}
    recipe = EnvironmentRecipe(kind, label, files, made_of, name, pip[0] if pip is not None else "")
    return PublishedEnvironment(shoal, put(msgspec.json.encode(recipe)))


def _put(put: Callable[[Path | bytes], str], source: Path | bytes) -> str:
    try:
        return put(source)
    except OSError as error:
        raise BadEnvironment(
            f"{source!s} cannot be stored for other machines", why=error.strerror or str(error)
        ) from error


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
