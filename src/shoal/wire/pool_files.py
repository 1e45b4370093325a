"""What a coordinator may hire: a file in its directory, written before it is started, for its owner only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import BadPool

FILE = "pools.json"
URLS = "urls"
LEAVING = "leaving"


class CoordinatorPools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pools as shoal.toml describes them, and the options of the agents that are started on their machines."""

    pools: dict[str, dict[str, Any]]
    agent: tuple[str, ...] = ()


class ReleaseProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a coordinator that ends for good has still to give back, and when it gives up at the latest."""

    left: int
    until: float


def write(directory: Path, hires: CoordinatorPools) -> None:
    """Tell a coordinator that is still to be started which pools it may hire from."""
    descriptor = os.open(directory / FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(hires))


def hiring_of(directory: Path) -> CoordinatorPools | None:
    """What the coordinator of this directory may hire, None if nothing."""
    path = directory / FILE
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=CoordinatorPools)
    except msgspec.DecodeError as error:
        raise BadPool("the pools of this coordinator cannot be read", where=str(path), why=str(error)) from error


def urls_of(directory: Path) -> tuple[str, ...]:
    """At which URLs machines elsewhere may reach the coordinator of this directory, in the order to try them."""
    for name in (URLS, "url"):
        try:
            found = tuple((directory / name).read_text("ascii").split())
        except (OSError, ValueError):
            found = ()
        if found:
            return found
    return ()


def say_leaving(directory: Path, leaving: ReleaseProgress) -> None:
    """Tell whoever waits for the end of this directory's coordinator."""
    part = directory / f"{LEAVING}.part"
    part.write_bytes(msgspec.json.encode(leaving))
    part.replace(directory / LEAVING)


def leaving_of(directory: Path) -> ReleaseProgress | None:
    """What the coordinator of this directory gives back before it ends, None if it does not say."""
    try:
        return msgspec.json.decode((directory / LEAVING).read_bytes(), type=ReleaseProgress)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
