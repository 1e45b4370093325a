"""Requests and results of `shoal doctor POOL`: what an agent checks on its machine, and what it finds."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.core.addresses import port_range
from shoal.core.world import Address
from shoal.wire.limits import (
    MAX_ITEMS,
    MAX_NAME,
    Amount,
    Bytes,
    Count,
    EpochSeconds,
    Labels,
    Name,
    Names,
    Seconds,
    Text,
)

MAX_LASTING_S = 60.0


class CheckRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to check. Without a peer: describe the machine and listen from now on. With one: connect to its addresses.

    `ports` and `interface` are the settings of members. Throughput is measured for at most `lasting_s` seconds, and
    the coordinator waits for the result by so much longer.
    """

    ports: Name = ""
    interface: Name = ""
    peer: Name = ""
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_NAME)] = ()
    lasting_s: Annotated[float, Meta(ge=0.0, le=MAX_LASTING_S)] = 1.0

    def __post_init__(self) -> None:
        port_range(self.ports)


class MachineFacts(msgspec.Struct, frozen=True):
    """Description of a machine.

    `listens` are the addresses at which its peers can try to connect, or `trouble` says why it cannot listen.
    `round_trips_s` are measured between the machine and the coordinator.
    """

    machine: Name
    python: Name
    platform: Name
    cores: Count
    devices: Names
    memory_bytes: Bytes
    disk_free_bytes: Bytes
    versions: Labels
    listens: Annotated[tuple[Address, ...], Meta(max_length=MAX_NAME)] = ()
    round_trips_s: Annotated[tuple[Seconds, ...], Meta(max_length=MAX_NAME)] = ()
    trouble: Text = ""


class ConnectAttempt(msgspec.Struct, frozen=True):
    """One attempt to connect to an address of a peer.

    `cause` (see `connect_errors`) is empty if the peer answered and proved its identity; `detail` explains it. The
    median `round_trip_s` and the throughput `bytes_per_s` are measured at one address per peer.
    """

    host: Name
    port: Count
    cause: Text = ""
    detail: Text = ""
    connect_s: Seconds = 0.0
    round_trip_s: Seconds | None = None
    bytes_per_s: Amount | None = None


class CheckResult(msgspec.Struct, frozen=True):
    """Answer to a request; `received` and `sent` are epoch seconds on the machine's own clock, to compare clocks."""

    received: EpochSeconds
    sent: EpochSeconds
    facts: MachineFacts | None = None
    attempts: Annotated[tuple[ConnectAttempt, ...], Meta(max_length=MAX_ITEMS)] = ()
