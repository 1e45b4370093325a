"""Sends the user's project to the coordinator, from where agents fetch it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shoal.launch.client import Client
from shoal.pack import project

MB = 1 << 20


def send(client: Client, root: Path | None, packed: Mapping[str, Path]) -> str:
    """The hash under which agents find the project; what is there already is not sent again."""
    found, contents = project.take(gathered(root, packed))
    name, data = project.encode(found)
    everything: Mapping[str, Path | bytes] = {**contents, name: data}
    client.send(everything)
    return name


def gathered(root: Path | None, packed: Mapping[str, Path]) -> dict[str, Path]:
    """All files that are sent along: those of a directory, and what was packed besides, which wins."""
    return {**(project.find(root) if root is not None else {}), **packed}


def weigh(root: Path | None, limit_mb: float, packed: Mapping[str, Path] = {}) -> str:
    """What would be sent, in one line; refuses what is too much."""
    files = gathered(root, packed)
    project.check_size(files, int(limit_mb * MB))
    return project.describe(files)
