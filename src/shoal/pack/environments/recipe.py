"""What agents run in on machines that may have nothing but Python: which kind it is, and what has to go there."""

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
    """An environment that was put where machines can fetch it, by the hashes of Shoal's wheel and of its recipe."""

    shoal: str
    recipe: str


class EnvironmentRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a machine makes it: `files` are hashes by name, `made_of` is the hash of all that it depends on.

    `shoal` and `pip` are the names of wheels among the files; there may be no pip.
    """

    kind: str
    label: str
    files: Mapping[str, str]
    made_of: str
    shoal: str
    pip: str = ""


PLACEHOLDER = PublishedEnvironment("<shoal>", "<recipe>")


def kind_of(text: str) -> str:
    """What an environment is, by its name."""
    name = Path(text).name
    if text == SHOAL_ONLY or name.endswith(".txt") or (name.startswith("pylock.") and name.endswith(".toml")):
        return REQUIREMENTS
    if name.endswith(ARCHIVES):
        return ARCHIVE
    if name.endswith(".pex"):
        return PEX
    do = f"write it as requirements: {_EXPORT}" if name == "uv.lock" else f"give {KINDS}"
    raise BadEnvironment(f"{name or text!r} is no environment that Shoal can make", why="its kind is unknown", do=do)


def resolve(text: str, base: Path, where: str = "") -> str:
    """An environment as shoal.toml names it, found on this disk: relative to the file's folder; empty stays empty."""
    if text in ("", SHOAL_ONLY):
        return text
    try:
        kind_of(text)
    except BadEnvironment as error:
        raise BadEnvironment(error.what, where=where, why=error.why, do=error.do) from None
    path = base / Path(text).expanduser()
    if not path.is_file():
        raise BadEnvironment(
            f"there is no file {text}",
            where=where,
            why=f"looked for {path}",
            do="correct environment, or make the file",
        )
    return str(path.resolve())


def publish(text: str, put: Callable[[Path | bytes], str]) -> PublishedEnvironment:
    """Put everything that machines will need where they can fetch it; `put` keeps it, and gives its hash."""
    name, data = wheel.build_shoal_wheel()
    ours = put(data)
    kind, label = kind_of(text), Path(text).name
    files: dict[str, str] = {}
    if kind == REQUIREMENTS:
        given = requirements.gather(Path(text)) if text != SHOAL_ONLY else {requirements.MAIN_FILE: b""}
        files = {one: _put(put, source) for one, source in given.items()}
    else:
        files = {label: _put(put, Path(text))}
    # An archive is the same whatever Shoal comes beside it; what is installed depends on both.
    made_of = _hash(kind, *(part for pair in sorted(files.items()) for part in pair), *_with(kind, ours))
    pip = wheel.build_pip_wheel() if kind == REQUIREMENTS else None
    files |= {name: ours, **({pip[0]: put(pip[1])} if pip is not None else {})}
    recipe = EnvironmentRecipe(kind, label, files, made_of, name, pip[0] if pip is not None else "")
    return PublishedEnvironment(ours, put(msgspec.json.encode(recipe)))


def _with(kind: str, shoal: str) -> tuple[str, ...]:
    return (shoal,) if kind == REQUIREMENTS else ()


def _put(put: Callable[[Path | bytes], str], source: Path | bytes) -> str:
    try:
        return put(source)
    except OSError as error:
        raise BadEnvironment(f"{source!s} cannot be sent along", why=error.strerror or str(error)) from error


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
