"""Sockets between members: tuned alike, and never inherited by forked children."""

from __future__ import annotations

import os
import select
import socket

_open: set[socket.socket] = set()
_hooked = False


def own(sock: socket.socket) -> socket.socket:
    """Register a socket so that a forked child closes it; return the socket.

    A child that kept it open, such as a DataLoader worker, would hide this member's death from its peers.
    """
    global _hooked
    if not _hooked:
        os.register_at_fork(after_in_child=_close_all_in_child)
        _hooked = True
    _open.add(sock)
    return sock


def disown(sock: socket.socket) -> None:
    """Shut down, close and unregister a socket that `own` registered.

    The shutdown comes first: while some thread polls a socket, closing it alone does not reach the peer.
    """
    _open.discard(sock)
    shut(sock)
    sock.close()


def shut(sock: socket.socket) -> None:
    """Shut a connection down in both directions, if it is still open."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _close_all_in_child() -> None:
    # close, never shutdown: the connection still belongs to the parent
    for sock in list(_open):
        try:
            sock.close()
        except OSError:
            continue
    _open.clear()


def tune(sock: socket.socket, user_timeout_ms: int) -> None:
    """Set low latency, and make the connection fail when the peer's machine disappears silently.

    Buffer sizes are left to the kernel: setting one turns off its auto-tuning, and gives less where rmem_max is small.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 5),
        ("TCP_USER_TIMEOUT", user_timeout_ms),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def alive(sock: socket.socket) -> bool:
    """Return whether the peer has neither closed nor reset a connection."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return not poll.poll(0)
