"""Sends the user's project to the coordinator, from where agents fetch it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from shoal.launch.api_client import ApiClient
from shoal.launch.coordinator_target import home
from shoal.pack import project
from shoal.store import journal

MB = 1 << 20


def send(client: ApiClient, root: Path | None, packed: Mapping[str, Path], token_file: str = "") -> str:
    """The hash under which agents find the project; what is there already is not sent again."""
    whole, contents = project.take(gathered(root, packed, token_file))
    name, data = project.encode(whole)
    everything: Mapping[str, Path | bytes] = {**contents, name: data}
    client.send(everything)
    return name


def gathered(root: Path | None, packed: Mapping[str, Path], token_file: str = "") -> dict[str, Path]:
    """All files that are sent along: those of a directory, and what was packed besides, which wins."""
    return {**(found(root, token_file) if root is not None else {}), **packed}


def found(root: Path, token_file: str = "") -> dict[str, Path]:
    """The files of a project; what Shoal keeps of its own, tokens among it, is none, wherever it is."""
    files = {name: path.resolve() for name, path in project.find(root).items()}
    kept = {home().resolve(), *_coordinators(files.values()), *([Path(token_file).resolve()] if token_file else [])}
    return {name: root / name for name, path in files.items() if kept.isdisjoint((path, *path.parents))}


def _coordinators(files: Collection[Path]) -> set[Path]:
    """The directories of coordinators that these files are in."""
    above = {place for path in files for place in path.parents}
    return {place for place in above if (place / journal.FILE).exists() and (place / "token").exists()}


def weigh(root: Path | None, limit_mb: float, packed: Mapping[str, Path], token_file: str = "") -> str:
    """What would be sent, in one line; refuses what is too much."""
    files = gathered(root, packed, token_file)
    project.check_size(files, int(limit_mb * MB))
    return project.describe(files)
