"""Machine check for `shoal doctor`: facts about this machine, and whether it reaches its peers.

It uses the same listener, handshake and addresses as members do, so that a check that succeeds is worth something.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import platform
import shutil
import socket
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import msgspec

from shoal.agent import machine_info
from shoal.core.world import Address, Seat
from shoal.errors import ShoalError
from shoal.settings import port_range
from shoal.wire import connect_errors
from shoal.wire.machine_check import CheckRequest, CheckResult, ConnectAttempt, MachineFacts
from shoal.worker.transport.connect import NoAddressReachable
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.handshake import CALL
from shoal.worker.transport.peers import Peers
from shoal.worker.transport.sockets import disown

RoundTrips = Callable[[int], Awaitable[list[float]]]
"""Measures round-trip times to the coordinator, in seconds."""

ROUND_TRIPS = 5
RUN = "shoal doctor"
INCARNATION = "doctor"
# Modules, and the names of the distributions that provide them.
PACKAGES = {
    "shoal": ("shoal-train",),
    "numpy": ("numpy",),
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly"),
    "keras": ("keras",),
}
REACH_S = 3.0
SOCKET_TIMEOUT_S = 10.0
PINGS = 15
MAX_STREAM_BYTES = 256 << 20
PARALLEL = 8
_CHUNK_BYTES = 1 << 20
_PING, _STREAM = b"p", b"s"


class MachineCheck:
    """Runs checks on this machine. From the first one on it listens for peers, until it is closed."""

    def __init__(self, token: str, agent: str, directory: Path, hosts: Callable[[str], tuple[str, ...]]) -> None:
        self._token, self._agent, self._directory, self._hosts = token, agent, directory, hosts
        self._peers: list[Peers] = []
        self._numbers = count(1)

    async def run(self, request: CheckRequest, received: float, round_trips: RoundTrips) -> CheckResult:
        """Run a check in a thread, so that the agent is not blocked; return its result."""
        if request.peer:
            attempts = await asyncio.to_thread(self.attempts, request)
            return CheckResult(received, time.time(), attempts=attempts)
        facts = await asyncio.to_thread(self.facts, request)
        facts = msgspec.structs.replace(facts, round_trips_s=tuple(await round_trips(ROUND_TRIPS)))
        return CheckResult(received, time.time(), facts)

    def facts(self, request: CheckRequest) -> MachineFacts:
        """Listen where members would, and return all facts but the round trips."""
        trouble = ""
        try:
            listens = self._listen(request)
        except (ShoalError, OSError) as error:
            listens, trouble = (), error.what if isinstance(error, ShoalError) else str(error)
            trouble += f": {error.why}" if isinstance(error, ShoalError) and error.why else ""
        return MachineFacts(
            machine=socket.gethostname(),
            python=platform.python_version(),
            platform=f"{platform.system()} {platform.machine()}",
            cores=machine_info.cores(),
            devices=machine_info.devices(),
            memory_bytes=machine_info.memory_bytes(),
            disk_free_bytes=shutil.disk_usage(self._directory).free,
            versions=_versions(),
            listens=listens,
            trouble=trouble,
        )

    def attempts(self, request: CheckRequest) -> tuple[ConnectAttempt, ...]:
        """Try each address of a peer; measure the first that answers."""
        peers = self._peers[0] if self._peers else self._open(request.interface, None)
        addresses = [Address(host, address.port) for address in request.addresses for host in address.hosts]
        with ThreadPoolExecutor(PARALLEL) as threads:
            attempts = list(threads.map(lambda address: self._try(peers, request.peer, address), addresses))
        for at, attempt in enumerate(attempts):
            if not attempt.cause:
                attempts[at] = self._measure(peers, request, attempt)
                break
        return tuple(attempts)

    def close(self) -> None:
        for peers in self._peers:
            peers.close()
        self._peers.clear()

    def _listen(self, request: CheckRequest) -> tuple[Address, ...]:
        """Listen on the first, middle and last free port of the range, or on any port; return the addresses."""
        self.close()
        span = port_range(request.ports)
        if span is None:
            return (self._open(request.interface, None).address,)
        middle = span[len(span) // 2]
        parts = (span, range(middle, span.stop), range(span.stop - 1, span.start - 1, -1))
        addresses: list[Address] = []
        for part in parts if len(span) > 2 else parts[:1]:
            if not any(address.port in part[:1] for address in addresses):
                addresses.append(self._open(request.interface, part).address)
        return tuple(addresses)

    def _open(self, interface: str, ports: range | None) -> Peers:
        host, *others = self._hosts(interface)
        peers = Peers(self._token.encode(), RUN, self._agent, INCARNATION, host, ports, others=others)
        peers.serve(CALL, lambda _, sock: _serve(sock))
        self._peers.append(peers)
        return peers

    def _connect(self, peers: Peers, peer: str, address: Address) -> socket.socket:
        seat = Seat(peer, INCARNATION, address)
        sock = peers.connect(CALL, next(self._numbers), seat, REACH_S, threading.Event())
        sock.settimeout(SOCKET_TIMEOUT_S)
        return sock

    def _try(self, peers: Peers, peer: str, address: Address) -> ConnectAttempt:
        began = time.monotonic()
        try:
            disown(self._connect(peers, peer, address))
        except ExchangeBroken as broken:
            failure = broken.__cause__
            error = failure.failures[address.host] if isinstance(failure, NoAddressReachable) else TimeoutError()
            cause = connect_errors.cause_of(error)
            more = f" ({error})" if cause in ("wrong peer", "broken") and str(error) else ""
            return ConnectAttempt(address.host, address.port, cause, connect_errors.MEANINGS[cause] + more)
        return ConnectAttempt(address.host, address.port, connect_s=time.monotonic() - began)

    def _measure(self, peers: Peers, request: CheckRequest, attempt: ConnectAttempt) -> ConnectAttempt:
        try:
            sock = self._connect(peers, request.peer, Address(attempt.host, attempt.port))
            try:
                round_trip_s = statistics.median(_ping(sock) for _ in range(PINGS))
                bytes_per_s = _stream(sock, request.lasting_s)
            finally:
                disown(sock)
        except (ExchangeBroken, OSError) as error:
            return ConnectAttempt(
                attempt.host, attempt.port, "broken", f"it answered, but broke during the measurement: {error}"
            )
        return ConnectAttempt(
            attempt.host,
            attempt.port,
            connect_s=attempt.connect_s,
            round_trip_s=round_trip_s,
            bytes_per_s=bytes_per_s,
        )


def _ping(sock: socket.socket) -> float:
    began = time.perf_counter()
    sock.sendall(_PING)
    if sock.recv(1) != _PING:
        raise OSError("the peer closed the connection")
    return time.perf_counter() - began


def _stream(sock: socket.socket, lasting_s: float) -> float:
    """Return the bytes per second that arrive at the peer, measured for `lasting_s` or `MAX_STREAM_BYTES`."""
    chunk, sent, began = bytes(_CHUNK_BYTES), 0, time.perf_counter()
    sock.sendall(_STREAM)
    # At least one chunk: on a busy machine, the time may be over before the first.
    while not sent or (sent < MAX_STREAM_BYTES and time.perf_counter() - began < lasting_s):
        sent += sock.send(chunk)
    sock.shutdown(socket.SHUT_WR)
    reply = b""
    while len(reply) < 8 and (data := sock.recv(8 - len(reply))):
        reply += data
    arrived = int.from_bytes(reply, "big")
    if arrived != sent:
        raise OSError(f"{arrived} of {sent} bytes arrived")
    return sent / max(time.perf_counter() - began, 1e-9)


def _serve(sock: socket.socket) -> None:
    """Answer a peer's check: echo every ping, and reply to a stream with the number of its bytes."""
    try:
        sock.settimeout(SOCKET_TIMEOUT_S)
        while (command := sock.recv(1)) == _PING:
            sock.sendall(command)
        if command == _STREAM:
            buffer, arrived = bytearray(_CHUNK_BYTES), 0
            while count := sock.recv_into(buffer):
                arrived += count
            sock.sendall(arrived.to_bytes(8, "big"))
    except OSError:
        return
    finally:
        disown(sock)


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name, distributions in PACKAGES.items():
        for distribution in distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions.setdefault(name, importlib.metadata.version(distribution))
    return versions
