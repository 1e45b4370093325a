"""Small files in a coordinator's directory that it shares with the commands that start, find and stop it.

`pools.json` lists the pools that the coordinator may request machines from. The launcher writes it before it starts the
coordinator; only the owner can read it, since it may contain credentials. `urls` has the addresses at which other
machines reach the coordinator. `releasing` exists while an ending coordinator still has machines to release.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import BadPool
from shoal.wire.limits import Count, EpochSeconds, Texts
from shoal.wire.malformed import MALFORMED

FILE = "pools.json"
URLS = "urls"
RELEASING = "releasing"


class CoordinatorPools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pools by name, as shoal.toml describes them, and the options of the agents started on their machines.

    `retired` names pools that shoal.toml no longer describes, but that may still have machines.
    """

    pools: dict[str, dict[str, Any]]
    agent: Texts = ()
    retired: Texts = ()


class ReleaseProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many machines an ending coordinator has still to release, and when (epoch seconds) it gives up."""

    remaining: Count
    until: EpochSeconds


def write_pools(directory: Path, pools: CoordinatorPools) -> None:
    """Write the pools of a coordinator that has not been started yet."""
    descriptor = os.open(directory / FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(pools))


def read_pools(directory: Path) -> CoordinatorPools | None:
    """Return the pools of a coordinator, or None if it has none; raise BadPool if the file cannot be decoded."""
    path = directory / FILE
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=CoordinatorPools)
    except MALFORMED as error:
        raise BadPool("the pools of this coordinator cannot be read", where=str(path), why=str(error)) from error


def read_urls(directory: Path) -> tuple[str, ...]:
    """Return the URLs at which other machines may reach a coordinator, in the order to try them."""
    for name in (URLS, "url"):
        try:
            urls = tuple((directory / name).read_text("ascii").split())
        except (OSError, ValueError):
            urls = ()
        if urls:
            return urls
    return ()


def write_release_progress(directory: Path, progress: ReleaseProgress) -> None:
    """Publish the progress for the command that waits until this coordinator has ended."""
    part = directory / f"{RELEASING}.part"
    part.write_bytes(msgspec.json.encode(progress))
    part.replace(directory / RELEASING)


def read_release_progress(directory: Path) -> ReleaseProgress | None:
    """Return what an ending coordinator still has to release, or None if it has not said so."""
    try:
        return msgspec.json.decode((directory / RELEASING).read_bytes(), type=ReleaseProgress)
    except (FileNotFoundError, *MALFORMED):
        return None
