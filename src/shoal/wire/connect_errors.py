"""Why an address did not answer, in words, and what to do about it."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Mapping
from typing import Literal

Cause = Literal["refused", "silent", "no route", "unknown name", "wrong peer", "turned away", "broken"]

WORDS: dict[Cause, str] = {
    "refused": "refused: nobody listens there, or a firewall rejects it",
    "silent": "no answer: a firewall drops it, or the machine is not there",
    "no route": "there is no route to it",
    "unknown name": "the name is not known here",
    "wrong peer": "another process answers there",
    "turned away": "it answers, and turned us away",
    "broken": "the connection broke",
}

_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.EINVAL, errno.EACCES)


def cause_of(error: BaseException) -> Cause:
    """What an attempt to connect failed by."""
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


def listed(failures: Mapping[str, BaseException]) -> str:
    """Each address with why it did not answer, in one sentence."""
    return "; ".join(f"{where}: {WORDS[cause_of(error)]}" for where, error in failures.items())


def in_words(error: BaseException) -> str:
    """One error for people: what the cause is, and what the system said."""
    if isinstance(error, ConnectionError) and error.errno is None:
        return str(error)
    said = f" ({error})" if str(error) else ""
    return WORDS[cause_of(error)] + said
