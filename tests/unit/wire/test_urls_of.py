"""Every cause has its own words."""

from __future__ import annotations

import errno
import socket
import ssl

import pytest

from shoal.wire import reach


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ConnectionRefusedError(), "refused"),
        (TimeoutError(), "silent"),
        (OSError(errno.ETIMEDOUT, "timed out"), "silent"),
        (OSError(errno.EHOSTUNREACH, "no route"), "no route"),
        (OSError(errno.ENETUNREACH, "no network"), "no route"),
        (socket.gaierror(-2, "not known"), "unknown name"),
        (ssl.SSLCertVerificationError("self-signed"), "somebody else"),
        (ValueError("did not receive a valid HTTP response"), "somebody else"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "broken"),
    ],
)
def test_a_cause_is_told_from_the_others(error, cause):
    assert reach.cause_of(error) == cause
    assert reach.WORDS[cause] in reach.listed({"https://lab:1": error})
    assert reach.listed({"https://lab:1": error}).startswith("https://lab:1: ")
