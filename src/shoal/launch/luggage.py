"""Sends the user's project to the coordinator, from where agents fetch it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shoal.launch.client import Client
from shoal.pack import project

MB = 1 << 20


def send(client: Client, root: Path) -> str:
    """The hash under which agents find the project; what is there already is not sent again."""
    found, contents = project.take(project.find(root))
    name, data = project.encode(found)
    everything: Mapping[str, Path | bytes] = {**contents, name: data}
    client.send(everything)
    return name


def weigh(root: Path, limit_mb: float) -> str:
    """What would be sent, in one line; refuses what is too much."""
    files = project.find(root)
    project.check_size(files, int(limit_mb * MB))
    return project.describe(files)
