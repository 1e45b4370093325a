"""The two connections of a rank in its ring: served by one thread, never blocked by one side, watched even when idle.

Data flows from the previous rank to the next one; the opposite direction of both connections carries single marks. A
rank that begins a large operation sends one byte of credit backwards, and no rank sends more than EAGER_BYTES without
it: unread bytes would fill a busy peer's TCP window until TCP_USER_TIMEOUT took it for dead. A rank that leaves on
purpose sends a farewell backwards, and forwards if it is between operations, so that its neighbours do not suspect it.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading

from shoal.worker.transport.exchange_broken import ExchangeBroken, ExchangeDisagreement
from shoal.worker.transport.sockets import disown

HEADER = struct.Struct("<HBx4sIQ")
HEADER_BYTES = HEADER.size
MAGIC = 0x5A0A
GATHER, REDUCE, TREE_REDUCE, FAREWELL = 1, 2, 3, 255
EAGER_BYTES = 64 << 10
_CREDIT, _FAREWELL_MARK = b"\x01", b"\xff"
_CLOSED = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL
_KINDS = {GATHER: "a gather", REDUCE: "a sum", TREE_REDUCE: "a sum over shards", FAREWELL: "a farewell"}


def make_header(kind: int, sequence: int, dtype: str, count_bytes: int) -> bytes:
    """Return the header that precedes an operation; it is equal on all ranks that agree."""
    return HEADER.pack(MAGIC, kind, dtype.encode()[:4], sequence & 0xFFFFFFFF, count_bytes)


def _describe(header: bytes) -> str:
    magic, kind, dtype, sequence, count_bytes = HEADER.unpack(header)
    if magic != MAGIC:
        return "bytes that are no operation"
    name = dtype.rstrip(b"\0").decode("ascii", "replace")
    return f"operation {sequence}, {_KINDS.get(kind, 'unknown')} of {count_bytes} bytes of {name}"


class RingLinks:
    """Connections to the next and previous rank of a ring of `size`, and the wake-up of the thread that serves them.

    `names` are the members at the next and the previous rank.
    """

    def __init__(self, size: int, following: socket.socket, preceding: socket.socket, names: tuple[str, str]) -> None:
        self.size = size
        self._next, self._prev = following, preceding
        self._next_name, self._prev_name = names
        following.setblocking(False)
        preceding.setblocking(False)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._open = True
        self._stopped: str | None = None
        self._credits = 0
        self._next_left = self._next_closed = False
        self._between_operations = True
        self._idle_poll, self._busy_poll = select.poll(), select.poll()
        self._next_fd, self._prev_fd = following.fileno(), preceding.fileno()
        for poll in (self._idle_poll, self._busy_poll):
            poll.register(self._wakeup, select.POLLIN)
            poll.register(self._next_fd, select.POLLRDHUP)
        self._idle_poll.register(self._prev_fd, select.POLLRDHUP)
        self._busy_poll.register(self._prev_fd, select.POLLIN)
        self._masks = {self._next_fd: int(select.POLLRDHUP), self._prev_fd: int(select.POLLIN)}

    # --- from any thread

    def wake(self) -> None:
        """Wake the serving thread from its poll."""
        with self._lock:
            if self._open:
                os.eventfd_write(self._wakeup, 1)

    def stop(self, cause: str) -> None:
        """End the operation under way, and let both neighbours notice at once."""
        with self._lock:
            if not self._open:
                return
            self._stopped = self._stopped or cause
            os.eventfd_write(self._wakeup, 1)
            self._shut()

    def has_incoming(self, timeout_s: float) -> bool:
        """Return whether the previous rank sends or closes within so many seconds; for use between operations."""
        poll = select.poll()
        poll.register(self._prev_fd, select.POLLIN | select.POLLRDHUP)
        return bool(poll.poll(timeout_s * 1000.0))

    def close(self) -> None:
        """Close both connections; only when the serving thread has ended."""
        with self._lock:
            if self._open:
                self._shut()
                self._open = False
                disown(self._next)
                disown(self._prev)
                os.close(self._wakeup)

    def _shut(self) -> None:
        # A farewell keeps the neighbours from suspecting us; during an operation it is possible backwards only.
        for sock, farewell in (
            (self._prev, _FAREWELL_MARK),
            (self._next, make_header(FAREWELL, 0, "", 0) if self._between_operations else b""),
        ):
            try:
                if farewell:
                    sock.send(farewell)
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    # --- from the serving thread only

    def rest(self) -> None:
        """Block until woken; raise ExchangeBroken as soon as a neighbour closes its connection."""
        if self._stopped is not None:
            raise ExchangeBroken(self._stopped)
        for fd, events in self._idle_poll.poll():
            if fd == self._wakeup:
                self._drain()
            elif fd == self._next_fd:
                self._read_credits(strict=True)
            elif events & _CLOSED:
                raise self._lost_previous()

    def begin(self, count_bytes: int) -> bool:
        """Begin an operation that may send so many bytes before it receives any; return whether it needs credit."""
        self.check()
        self._between_operations = False
        if count_bytes <= EAGER_BYTES:
            return False
        try:
            self._prev.send(_CREDIT)
        except OSError as error:
            raise self._lost_previous(error) from error
        return True

    def end(self) -> None:
        """End an operation: everything that belongs to it has been sent and received."""
        self._between_operations = True

    def lacks_credit(self, sent: int) -> bool:
        """Return whether the next rank's credit is still missing after `sent` bytes; use it up if it has arrived."""
        # Look only when it blocks us: by then it has usually arrived, without an extra wake-up.
        if not self._credits and sent >= EAGER_BYTES:
            self._read_credits(strict=True)
        if not self._credits:
            return True
        self._credits -= 1
        return False

    def check(self) -> None:
        """Raise ExchangeBroken if the ring was stopped."""
        if self._stopped is not None:
            raise ExchangeBroken(self._stopped)

    def send(self, view: memoryview, more: bool = False) -> int:
        """Send to the next rank as much as fits; return how many bytes that was."""
        try:
            return self._next.send(view, socket.MSG_MORE if more else 0)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost_next(error) from error

    def receive(self, view: memoryview) -> int:
        """Receive from the previous rank what has arrived; return how many bytes that was."""
        try:
            count = self._prev.recv_into(view)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost_previous(error) from error
        if count == 0:
            raise self._lost_previous()
        return count

    def wait(self, reading: bool, writing: bool, needs_next: bool, starved: bool) -> None:
        """Block until something can be received or sent, credit arrives, or the ring is stopped."""
        self._mask(self._prev_fd, select.POLLIN if reading else 0)
        # Credit that is not needed yet must not wake us.
        watch = select.POLLRDHUP | (select.POLLOUT if writing else select.POLLIN if starved else 0)
        self._mask(self._next_fd, watch if not self._next_closed or needs_next else 0)
        for fd, events in self._busy_poll.poll():
            if fd == self._wakeup:
                self._drain()
            elif fd == self._next_fd and events & (select.POLLIN | _CLOSED):
                self._read_credits(strict=needs_next)

    def _mask(self, fd: int, mask: int) -> None:
        if self._masks.get(fd) == mask:
            return
        if mask == 0:
            self._busy_poll.unregister(fd)
        elif self._masks.get(fd, 0) == 0:
            self._busy_poll.register(fd, mask)
        else:
            self._busy_poll.modify(fd, mask)
        self._masks[fd] = mask

    def _drain(self) -> None:
        try:
            os.eventfd_read(self._wakeup)
        except BlockingIOError:
            return

    def _read_credits(self, strict: bool) -> None:
        # The next rank may close cleanly while we still receive; that matters only if we have more to send to it.
        try:
            marks = self._next.recv(64)
        except BlockingIOError:
            return
        except OSError as error:
            if strict:
                raise self._lost_next(error) from error
            marks = b""
        self._credits += marks.count(_CREDIT)
        self._next_left = self._next_left or _FAREWELL_MARK in marks
        if marks and not self._next_left:
            return
        if strict:
            raise self._lost_next()
        self._next_closed = True

    def compare(self, ours: bytes, theirs: memoryview) -> None:
        """Raise ExchangeBroken if the previous rank's header differs from ours."""
        if theirs == ours:
            return
        if _is_farewell(bytes(theirs)):
            raise ExchangeBroken(f"{self._prev_name} left the ring")
        raise ExchangeDisagreement(
            f"{self._prev_name} and this member disagree: it begins {_describe(bytes(theirs))}, "
            f"this member {_describe(ours)}"
        )

    def _lost_next(self, error: OSError | None = None) -> ExchangeBroken:
        if error is not None:
            self._look_for_farewell()
        if self._next_left:
            return ExchangeBroken(f"{self._next_name} left the ring")
        return ExchangeBroken(f"lost {self._next_name}: {_reason(error)}", (self._next_name,))

    def _lost_previous(self, error: OSError | None = None) -> ExchangeBroken:
        if self._between_operations and error is None and self._sent_farewell():
            return ExchangeBroken(f"{self._prev_name} left the ring")
        first = (self._next_name,) if self._next_closed and not self._next_left else ()
        suspects = tuple(dict.fromkeys((*first, self._prev_name)))
        return ExchangeBroken(f"lost {self._prev_name}: {_reason(error)}", suspects)

    def _look_for_farewell(self) -> None:
        try:
            self._next_left = self._next_left or _FAREWELL_MARK in self._next.recv(64)
        except OSError:
            return

    def _sent_farewell(self) -> bool:
        try:
            return _is_farewell(self._prev.recv(HEADER_BYTES, socket.MSG_PEEK))
        except OSError:
            return False


def _is_farewell(header: bytes) -> bool:
    return len(header) == HEADER_BYTES and HEADER.unpack(header)[:2] == (MAGIC, FAREWELL)


def _reason(error: OSError | None) -> str:
    if error is None:
        return "it closed the connection"
    if error.errno == errno.ETIMEDOUT:
        return "it did not answer in time"
    return os.strerror(error.errno) if error.errno else str(error)
