"""Transfer of a snapshot from a member that has the state to one that needs it, in checksummed chunks.

::

    source → reader   magic, length and CRC-32 of the transfer header, the header (step, state header, buffer sizes)
    source → reader   for each chunk of each buffer, in order: its CRC-32, its bytes
    reader → source   one byte: everything arrived

The reader checks every chunk before it is used and raises `ExchangeBroken` on damage, silence or a closed connection.
Only the last two make the source a suspect: damaged data says nothing about whether it is alive.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.wire.malformed import MALFORMED
from shoal.worker.transport.exchange_broken import ExchangeBroken

CHUNK_BYTES = 2 << 20
HEADER_LIMIT_BYTES = 64 << 20
_PREFIX = struct.Struct("!4sII")
_MAGIC = b"shst"
_CHECKSUM = struct.Struct("!I")
_RECEIVED = b"\x06"
_POLL_S = 0.02
# poll(2) counts milliseconds in 32 bits, and Python lets larger timeouts wrap around.
MAX_TIMEOUT_S = 2e6


class SnapshotLike(Protocol):
    """The parts of a snapshot that a transfer uses."""

    @property
    def step(self) -> int: ...

    @property
    def header(self) -> bytes: ...

    @property
    def sizes(self) -> Sequence[int]: ...

    def chunk(self, reader: str, index: int, start: int, stop: int) -> bytes: ...

    def done(self, reader: str) -> None: ...


@dataclass(frozen=True)
class ReceivedState:
    """A state as it arrived: complete and checked."""

    step: int
    header: bytes
    buffers: list[NDArray[np.uint8]]


class TransferHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Announcement of what a source is about to send."""

    step: int
    header: bytes
    sizes: tuple[int, ...]


def send(sock: socket.socket, snapshot: SnapshotLike, reader: str, hang_timeout_s: float) -> None:
    """Send a snapshot to one reader; mark the reader as done in the snapshot, however this ends."""
    try:
        sock.settimeout(min(hang_timeout_s, MAX_TIMEOUT_S))
        sizes = tuple(snapshot.sizes)
        header = msgspec.msgpack.encode(TransferHeader(snapshot.step, bytes(snapshot.header), sizes))
        sock.sendall(_PREFIX.pack(_MAGIC, len(header), zlib.crc32(header)))
        sock.sendall(header)
        for index, start, stop in _chunks(sizes):
            data = snapshot.chunk(reader, index, start, stop)
            sock.sendall(_CHECKSUM.pack(zlib.crc32(data)), socket.MSG_MORE)
            sock.sendall(data)
        sock.recv(1)
    finally:
        snapshot.done(reader)


def receive(
    sock: socket.socket, source: str, timeout_s: float, cancelled: threading.Event, begin_s: float | None = None
) -> ReceivedState:
    """Wait for a source to begin, then receive its snapshot.

    `timeout_s` bounds every wait for the next byte, and `begin_s`, if given, that for the first one.
    """
    reader = _StateReader(sock, source, timeout_s if begin_s is None else begin_s, cancelled)
    magic, length, checksum = _PREFIX.unpack(reader.read(_PREFIX.size))
    reader.timeout_s = timeout_s
    if magic != _MAGIC or length > HEADER_LIMIT_BYTES:
        raise reader.broken("sent something that is not a state")
    packed = reader.read(length)
    if zlib.crc32(packed) != checksum:
        raise reader.broken("sent a corrupt header: checksum mismatch")
    header = _decode(packed, reader)
    buffers = [np.empty(size, np.uint8) for size in header.sizes]
    for index, start, stop in _chunks(header.sizes):
        (checksum,) = _CHECKSUM.unpack(reader.read(_CHECKSUM.size))
        chunk = buffers[index][start:stop].data
        reader.read_into(chunk)
        if zlib.crc32(chunk) != checksum:
            raise reader.broken(f"sent a corrupt chunk: checksum mismatch in buffer {index} at byte {start}")
    reader.acknowledge()
    return ReceivedState(header.step, header.header, buffers)


def _decode(packed: memoryview, reader: _StateReader) -> TransferHeader:
    try:
        header = msgspec.msgpack.decode(packed, type=TransferHeader)
    except MALFORMED as error:
        raise reader.broken(f"sent a malformed header ({error})") from error
    if any(size < 0 for size in header.sizes) or header.step < 0:
        raise reader.broken("announced a state of negative size")
    total_bytes, memory_bytes = sum(header.sizes), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if total_bytes > memory_bytes:
        raise reader.broken(f"announced {total_bytes} bytes of state; this machine has {memory_bytes} bytes of memory")
    return header


def _chunks(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for index, size in enumerate(sizes):
        for start in range(0, size, CHUNK_BYTES):
            yield index, start, min(start + CHUNK_BYTES, size)


class _StateReader:
    """Reads from a source until cancelled, or until nothing has arrived for `timeout_s`."""

    def __init__(self, sock: socket.socket, source: str, timeout_s: float, cancelled: threading.Event) -> None:
        sock.setblocking(False)
        self._sock, self._source = sock, source
        self.timeout_s, self._cancelled = timeout_s, cancelled
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def read(self, count: int) -> memoryview:
        data = memoryview(bytearray(count))
        self.read_into(data)
        return data

    def read_into(self, target: memoryview) -> None:
        """Fill the whole of `target`, or raise ExchangeBroken."""
        filled = 0
        deadline = time.monotonic() + self.timeout_s
        while filled < len(target):
            try:
                count = self._sock.recv_into(target[filled:])
            except BlockingIOError:
                self._wait(deadline)
                continue
            except OSError as error:
                raise self.broken(f"was lost during the state transfer: {error}", suspect=True) from error
            if count == 0:
                raise self.broken("closed the connection before the state was complete", suspect=True)
            if self._cancelled.is_set():
                raise ExchangeBroken("this member no longer needs the state")
            filled += count
            deadline = time.monotonic() + self.timeout_s

    def _wait(self, deadline: float) -> None:
        while not self._poll.poll(_POLL_S * 1000):
            if self._cancelled.is_set():
                raise ExchangeBroken("this member no longer needs the state")
            if time.monotonic() > deadline:
                raise self.broken(f"sent nothing of the state for {self.timeout_s:g} s", suspect=True)

    def acknowledge(self) -> None:
        try:
            self._sock.send(_RECEIVED)
        except OSError:
            return

    def broken(self, what: str, suspect: bool = False) -> ExchangeBroken:
        return ExchangeBroken(f"{self._source} {what}", (self._source,) if suspect else ())
