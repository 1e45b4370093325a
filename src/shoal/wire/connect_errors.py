"""Causes of failed connection attempts, in words that a user can act on."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Mapping
from typing import Literal

Cause = Literal["refused", "silent", "no route", "unknown name", "wrong peer", "rejected", "broken"]

MEANINGS: dict[Cause, str] = {
    "refused": "connection refused: no process listens there, or a firewall rejects it",
    "silent": "no answer: a firewall drops the packets, or the machine is down",
    "no route": "no route to that address",
    "unknown name": "the host name cannot be resolved here",
    "wrong peer": "another process answers there",
    "rejected": "the peer rejected the connection",
    "broken": "the connection broke",
}

_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.EINVAL, errno.EACCES)


def cause_of(error: BaseException) -> Cause:
    """Return the cause of a failed attempt; errors that are not the system's mean that the peer is a wrong one."""
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, socket.gaierror):
        return "unknown name"
    if isinstance(error, ssl.SSLError):
        return "wrong peer"
    if isinstance(error, TimeoutError):
        return "silent"
    if isinstance(error, OSError):
        return "silent" if error.errno == errno.ETIMEDOUT else "no route" if error.errno in _NO_ROUTE else "broken"
    return "wrong peer"


def describe_all(failures: Mapping[str, BaseException]) -> str:
    """Return one line that lists every address with the cause of its failure."""
    return "; ".join(f"{where}: {MEANINGS[cause_of(error)]}" for where, error in failures.items())


def describe(error: BaseException) -> str:
    """Return the meaning of one error, with the system's own message in parentheses."""
    if isinstance(error, ConnectionError) and error.errno is None:
        return str(error)
    message = f" ({error})" if str(error) else ""
    return MEANINGS[cause_of(error)] + message
