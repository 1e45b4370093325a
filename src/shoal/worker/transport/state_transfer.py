"""Streams a snapshot from a member that has the state to one that needs it, in checksummed pieces.

::

    source → reader   length and checksum of the contents, the contents (step, header, sizes)
    source → reader   for each piece of each buffer, in order: its checksum, its bytes
    reader → source   one byte: all is well
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

from shoal.worker.collectives.exchange import ExchangeBroken

PIECE_BYTES = 2 << 20
CONTENTS_LIMIT_BYTES = 64 << 20
_PREFIX = struct.Struct("!4sII")
_MAGIC = b"shst"
_CHECKSUM = struct.Struct("!I")
_THANKS = b"\x06"
_GLANCE_S = 0.02


class SnapshotLike(Protocol):
    """What can be handed over: a snapshot."""

    @property
    def step(self) -> int: ...

    @property
    def header(self) -> bytes: ...

    @property
    def sizes(self) -> Sequence[int]: ...

    def piece(self, reader: str, index: int, start: int, stop: int) -> bytes: ...

    def done(self, reader: str) -> None: ...


@dataclass(frozen=True)
class ReceivedState:
    """A state as it arrived: complete and checked."""

    step: int
    header: bytes
    buffers: list[NDArray[np.uint8]]


class TransferHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What a source is about to send."""

    step: int
    header: bytes
    sizes: tuple[int, ...]


def send(sock: socket.socket, snapshot: SnapshotLike, reader: str, hang_timeout_s: float) -> None:
    """Hand a snapshot to one reader; whatever happens, the snapshot knows afterwards that the reader is done."""
    try:
        sock.settimeout(hang_timeout_s)
        sizes = tuple(snapshot.sizes)
        contents = msgspec.msgpack.encode(TransferHeader(snapshot.step, bytes(snapshot.header), sizes))
        sock.sendall(_PREFIX.pack(_MAGIC, len(contents), zlib.crc32(contents)))
        sock.sendall(contents)
        for index, start, stop in _pieces(sizes):
            data = snapshot.piece(reader, index, start, stop)
            sock.sendall(_CHECKSUM.pack(zlib.crc32(data)), socket.MSG_MORE)
            sock.sendall(data)
        sock.recv(1)
    finally:
        snapshot.done(reader)


def receive(sock: socket.socket, source: str, timeout_s: float, cancelled: threading.Event) -> ReceivedState:
    """Wait for a source to begin, then take its snapshot; `timeout_s` bounds every wait for the next byte."""
    inlet = _StateReader(sock, source, timeout_s, cancelled)
    magic, length, checksum = _PREFIX.unpack(inlet.exactly(_PREFIX.size))
    if magic != _MAGIC or length > CONTENTS_LIMIT_BYTES:
        raise inlet.broken("sent something that is no state")
    packed = inlet.exactly(length)
    if zlib.crc32(packed) != checksum:
        raise inlet.broken("sent contents that were damaged on the way")
    contents = _decode(packed, inlet)
    buffers = [np.empty(size, np.uint8) for size in contents.sizes]
    for index, start, stop in _pieces(contents.sizes):
        (checksum,) = _CHECKSUM.unpack(inlet.exactly(_CHECKSUM.size))
        piece = buffers[index][start:stop].data
        inlet.fill(piece)
        if zlib.crc32(piece) != checksum:
            raise inlet.broken(f"sent a piece that was damaged on the way (buffer {index}, byte {start})")
    inlet.thank()
    return ReceivedState(contents.step, contents.header, buffers)


def _decode(packed: memoryview, inlet: _StateReader) -> TransferHeader:
    try:
        contents = msgspec.msgpack.decode(packed, type=TransferHeader)
    except msgspec.MsgspecError as error:
        raise inlet.broken(f"sent malformed contents ({error})") from error
    if any(size < 0 for size in contents.sizes) or contents.step < 0:
        raise inlet.broken("announced a state of negative size")
    total_bytes, memory_bytes = sum(contents.sizes), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if total_bytes > memory_bytes:
        raise inlet.broken(f"announced {total_bytes} bytes of state, more than the {memory_bytes} bytes of memory here")
    return contents


def _pieces(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for index, size in enumerate(sizes):
        for start in range(0, size, PIECE_BYTES):
            yield index, start, min(start + PIECE_BYTES, size)


class _StateReader:
    """Reads from a source, bounded in time without progress, until cancelled."""

    def __init__(self, sock: socket.socket, source: str, timeout_s: float, cancelled: threading.Event) -> None:
        sock.setblocking(False)
        self._sock, self._source = sock, source
        self._timeout_s, self._cancelled = timeout_s, cancelled
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def exactly(self, count: int) -> memoryview:
        data = memoryview(bytearray(count))
        self.fill(data)
        return data

    def fill(self, target: memoryview) -> None:
        got = 0
        deadline = time.monotonic() + self._timeout_s
        while got < len(target):
            try:
                count = self._sock.recv_into(target[got:])
            except BlockingIOError:
                self._wait(deadline)
                continue
            except OSError as error:
                raise self.broken(f"was lost while it handed over the state: {error}", suspect=True) from error
            if count == 0:
                raise self.broken("closed the connection before the state was complete", suspect=True)
            if self._cancelled.is_set():
                raise ExchangeBroken("this member no longer needs the state")
            got += count
            deadline = time.monotonic() + self._timeout_s

    def _wait(self, deadline: float) -> None:
        while not self._poll.poll(_GLANCE_S * 1000):
            if self._cancelled.is_set():
                raise ExchangeBroken("this member no longer needs the state")
            if time.monotonic() > deadline:
                raise self.broken(f"sent nothing of the state for {self._timeout_s:g} s", suspect=True)

    def thank(self) -> None:
        try:
            self._sock.send(_THANKS)
        except OSError:
            return

    def broken(self, what: str, suspect: bool = False) -> ExchangeBroken:
        return ExchangeBroken(f"{self._source} {what}", (self._source,) if suspect else ())
