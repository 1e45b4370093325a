"""What `shoal doctor POOL` asks of machines, and what they find."""

from __future__ import annotations

import msgspec

from shoal.core.world import Address


class CheckRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Without a peer: describe yourself, and listen from now on. With one: reach it at each of these addresses.

    `ports` and `interface` are as of members; bytes are sent for `lasting_s` at most.
    """

    ports: str = ""
    interface: str = ""
    peer: str = ""
    addresses: tuple[Address, ...] = ()
    lasting_s: float = 1.0


class MachineFacts(msgspec.Struct, frozen=True):
    """What a machine says of itself; `listens` is where its peers may try to reach it, `trouble` why they cannot.

    `round_trips_s` are those to the coordinator.
    """

    machine: str
    python: str
    platform: str
    cores: int
    devices: tuple[str, ...]
    memory_bytes: int
    disk_free_bytes: int
    versions: dict[str, str]
    listens: tuple[Address, ...] = ()
    round_trips_s: tuple[float, ...] = ()
    trouble: str = ""


class ConnectAttempt(msgspec.Struct, frozen=True):
    """One address of a peer that was tried; `cause` is empty if the peer itself answered, and proved to be it.

    `round_trip_s` is the median, and `bytes_per_s` what went through; both are measured at one address of a peer.
    """

    host: str
    port: int
    cause: str = ""
    said: str = ""
    connect_s: float = 0.0
    round_trip_s: float | None = None
    bytes_per_s: float | None = None


class CheckResult(msgspec.Struct, frozen=True):
    """The answer to a question; `received` and `sent` are by the machine's own clock."""

    received: float
    sent: float
    facts: MachineFacts | None = None
    attempts: tuple[ConnectAttempt, ...] = ()
