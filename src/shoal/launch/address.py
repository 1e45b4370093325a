"""Where the coordinator of a launch listens."""

from __future__ import annotations

from collections.abc import Iterable

LOOPBACK = "127.0.0.1"
EVERYWHERE = "::"


def of_coordinator(engines: Iterable[str]) -> str:
    """Loopback if nobody comes from elsewhere; otherwise every interface: any may be the one that leads here."""
    return LOOPBACK if all(engine == "local" for engine in engines) else EVERYWHERE
