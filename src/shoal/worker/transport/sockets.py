"""Sockets between members: tuned alike, and never inherited by forked children."""

from __future__ import annotations

import os
import select
import socket

_open: set[socket.socket] = set()
_hooked = False


def own(sock: socket.socket) -> socket.socket:
    """Remember a socket, so that a forked child closes it.

    A child that kept it, such as a DataLoader's worker, would hide this member's death from its peers.
    """
    global _hooked
    if not _hooked:
        os.register_at_fork(after_in_child=_forget_all)
        _hooked = True
    _open.add(sock)
    return sock


def disown(sock: socket.socket) -> None:
    """Close a socket that `own` remembered.

    Shut it first: as long as some thread polls a socket, closing it alone does not tell the peer.
    """
    _open.discard(sock)
    shut(sock)
    sock.close()


def shut(sock: socket.socket) -> None:
    """End a connection in both directions, if it has not ended yet."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _forget_all() -> None:
    # close, never shutdown: the connection is still the parent's
    for sock in list(_open):
        try:
            sock.close()
        except OSError:
            continue
    _open.clear()


def tune(sock: socket.socket, user_timeout_ms: int) -> None:
    """Make a connection fast, and make it fail when the peer's machine has silently gone.

    Buffers are left to the system: asking for a size ends its own tuning, and gets less where rmem_max is small.
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
    """Whether the peer of a connection has neither closed nor reset it."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return not poll.poll(0)
