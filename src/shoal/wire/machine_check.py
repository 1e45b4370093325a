"""Requests and results of `shoal doctor POOL`: what an agent checks on its machine, and what it finds."""

from __future__ import annotations

import msgspec

from shoal.core.world import Address


class CheckRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to check. Without a peer: describe the machine and listen from now on. With one: connect to its addresses.

    `ports` and `interface` are the settings of members. Throughput is measured for at most `lasting_s` seconds.
    """

    ports: str = ""
    interface: str = ""
    peer: str = ""
    addresses: tuple[Address, ...] = ()
    lasting_s: float = 1.0


class MachineFacts(msgspec.Struct, frozen=True):
    """Description of a machine.

    `listens` are the addresses at which its peers can try to connect, or `trouble` says why it cannot listen.
    `round_trips_s` are measured between the machine and the coordinator.
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
    """One attempt to connect to an address of a peer.

    `cause` (see `connect_errors`) is empty if the peer answered and proved its identity; `detail` explains it. The
    median `round_trip_s` and the throughput `bytes_per_s` are measured at one address per peer.
    """

    host: str
    port: int
    cause: str = ""
    detail: str = ""
    connect_s: float = 0.0
    round_trip_s: float | None = None
    bytes_per_s: float | None = None


class CheckResult(msgspec.Struct, frozen=True):
    """Answer to a request; `received` and `sent` are epoch seconds on the machine's own clock, to compare clocks."""

    received: float
    sent: float
    facts: MachineFacts | None = None
    attempts: tuple[ConnectAttempt, ...] = ()
