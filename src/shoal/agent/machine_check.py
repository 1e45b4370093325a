"""What this machine is like, and whether others can be reached from it, over the very connections of members."""

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
"""Takes so many round trips to the coordinator, in seconds."""

ROUND_TRIPS = 5
RUN = "shoal doctor"
LIFE = "doctor"
# What is imported, and under which names it is installed.
PACKAGES = {
    "shoal": ("shoal-train",),
    "numpy": ("numpy",),
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly"),
    "keras": ("keras",),
}
REACH_S = 3.0
QUIET_S = 10.0
PINGS = 15
MOST_BYTES = 256 << 20
AT_ONCE = 8
_PIECE_BYTES = 1 << 20
_PING, _STREAM = b"p", b"s"


class MachineCheck:
    """Answers what is asked of this machine; it listens from the first question on, until it is closed."""

    def __init__(self, token: str, agent: str, directory: Path, hosts: Callable[[str], tuple[str, ...]]) -> None:
        self._token, self._agent, self._directory, self._hosts = token, agent, directory, hosts
        self._ports: list[Peers] = []
        self._numbers = count(1)

    async def answer(self, question: CheckRequest, received: float, trips: RoundTrips) -> CheckResult:
        """Look in a thread: what is examined goes on meanwhile."""
        if question.peer:
            attempts = await asyncio.to_thread(self.attempts, question)
            return CheckResult(received, time.time(), attempts=attempts)
        facts = await asyncio.to_thread(self.facts, question)
        facts = msgspec.structs.replace(facts, round_trips_s=tuple(await trips(ROUND_TRIPS)))
        return CheckResult(received, time.time(), facts)

    def facts(self, question: CheckRequest) -> MachineFacts:
        """All but the round trips, and listen where members would."""
        trouble = ""
        try:
            listens = self._listen(question)
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

    def attempts(self, question: CheckRequest) -> tuple[ConnectAttempt, ...]:
        """Each address of a peer, tried by itself; the first that answers is measured."""
        port = self._ports[0] if self._ports else self._open(question.interface, None)
        tried = [Address(host, one.port) for one in question.addresses for host in one.hosts]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            found = list(threads.map(lambda address: self._try(port, question.peer, address), tried))
        for at, attempt in enumerate(found):
            if not attempt.cause:
                found[at] = self._measure(port, question, attempt)
                break
        return tuple(found)

    def close(self) -> None:
        for port in self._ports:
            port.close()
        self._ports.clear()

    def _listen(self, question: CheckRequest) -> tuple[Address, ...]:
        """On the first, the middle and the last port of a range that are free, or on any."""
        self.close()
        span = port_range(question.ports)
        if span is None:
            return (self._open(question.interface, None).address,)
        middle = span[len(span) // 2]
        parts = (span, range(middle, span.stop), range(span.stop - 1, span.start - 1, -1))
        found: list[Address] = []
        for part in parts if len(span) > 2 else parts[:1]:
            if not any(one.port in part[:1] for one in found):
                found.append(self._open(question.interface, part).address)
        return tuple(found)

    def _open(self, interface: str, ports: range | None) -> Peers:
        host, *others = self._hosts(interface)
        port = Peers(self._token.encode(), RUN, self._agent, LIFE, host, ports, others=others)
        port.serve(CALL, lambda _, sock: _answer(sock))
        self._ports.append(port)
        return port

    def _call(self, port: Peers, peer: str, address: Address) -> socket.socket:
        seat = Seat(peer, LIFE, address)
        sock = port.connect(CALL, next(self._numbers), seat, REACH_S, threading.Event())
        sock.settimeout(QUIET_S)
        return sock

    def _try(self, port: Peers, peer: str, address: Address) -> ConnectAttempt:
        began = time.monotonic()
        try:
            disown(self._call(port, peer, address))
        except ExchangeBroken as broken:
            none = broken.__cause__
            error = none.failures[address.host] if isinstance(none, NoAddressReachable) else TimeoutError()
            cause = connect_errors.cause_of(error)
            more = f" ({error})" if cause in ("somebody else", "broken") and str(error) else ""
            return ConnectAttempt(address.host, address.port, cause, connect_errors.WORDS[cause] + more)
        return ConnectAttempt(address.host, address.port, connect_s=time.monotonic() - began)

    def _measure(self, port: Peers, question: CheckRequest, attempt: ConnectAttempt) -> ConnectAttempt:
        try:
            sock = self._call(port, question.peer, Address(attempt.host, attempt.port))
            try:
                round_trip_s = statistics.median(_ping(sock) for _ in range(PINGS))
                bytes_per_s = _stream(sock, question.lasting_s)
            finally:
                disown(sock)
        except (ExchangeBroken, OSError) as error:
            return ConnectAttempt(attempt.host, attempt.port, "broken", f"it answered, and broke when used: {error}")
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
        raise OSError("it hung up")
    return time.perf_counter() - began


def _stream(sock: socket.socket, lasting_s: float) -> float:
    """Bytes in a second that arrive there: until the time is over, or there were enough."""
    piece, sent, began = bytes(_PIECE_BYTES), 0, time.perf_counter()
    sock.sendall(_STREAM)
    while sent < MOST_BYTES and time.perf_counter() - began < lasting_s:
        sent += sock.send(piece)
    sock.shutdown(socket.SHUT_WR)
    told = b""
    while len(told) < 8 and (heard := sock.recv(8 - len(told))):
        told += heard
    arrived = int.from_bytes(told, "big")
    if arrived != sent:
        raise OSError(f"{arrived} of {sent} bytes arrived")
    return sent / max(time.perf_counter() - began, 1e-9)


def _answer(sock: socket.socket) -> None:
    """The other side: every ping comes back, and of a stream how many bytes it had."""
    try:
        sock.settimeout(QUIET_S)
        while (said := sock.recv(1)) == _PING:
            sock.sendall(said)
        if said == _STREAM:
            buffer, arrived = bytearray(_PIECE_BYTES), 0
            while heard := sock.recv_into(buffer):
                arrived += heard
            sock.sendall(arrived.to_bytes(8, "big"))
    except OSError:
        return
    finally:
        disown(sock)


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, installed in PACKAGES.items():
        for one in installed:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found.setdefault(name, importlib.metadata.version(one))
    return found
