"""Sends the user's project to the coordinator, from where agents fetch it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shoal.launch.client import Client
from shoal.launch.place import home
from shoal.pack import project

MB = 1 << 20


def send(client: Client, root: Path | None, packed: Mapping[str, Path]) -> str:
    """The hash under which agents find the project; what is there already is not sent again."""
    whole, contents = project.take(gathered(root, packed))
    name, data = project.encode(whole)
    everything: Mapping[str, Path | bytes] = {**contents, name: data}
    client.send(everything)
    return name


def gathered(root: Path | None, packed: Mapping[str, Path]) -> dict[str, Path]:
    """All files that are sent along: those of a directory, and what was packed besides, which wins."""
    return {**(found(root) if root is not None else {}), **packed}


def found(root: Path) -> dict[str, Path]:
    """The files of a project; what Shoal keeps of its own, tokens among it, is none, wherever it is."""
    kept = home().resolve()
    return {name: path for name, path in project.find(root).items() if not path.resolve().is_relative_to(kept)}


def weigh(root: Path | None, limit_mb: float, packed: Mapping[str, Path]) -> str:
    """What would be sent, in one line; refuses what is too much."""
    files = gathered(root, packed)
    project.check_size(files, int(limit_mb * MB))
    return project.describe(files)
