"""Every cause has its own words."""

from __future__ import annotations

import errno
import socket
import ssl

import pytest

from shoal.wire import connect_errors


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ConnectionRefusedError(), "refused"),
        (TimeoutError(), "silent"),
        (OSError(errno.ETIMEDOUT, "timed out"), "silent"),
        (OSError(errno.EHOSTUNREACH, "no route"), "no route"),
        (OSError(errno.ENETUNREACH, "no network"), "no route"),
        (socket.gaierror(-2, "not known"), "unknown name"),
        (ssl.SSLCertVerificationError("self-signed"), "wrong peer"),
        (ValueError("did not receive a valid HTTP response"), "wrong peer"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "broken"),
    ],
)
def test_a_cause_is_told_from_the_others(error, cause):
    assert connect_errors.cause_of(error) == cause
    assert connect_errors.MEANINGS[cause] in connect_errors.describe_all({"https://lab:1": error})
    assert connect_errors.describe_all({"https://lab:1": error}).startswith("https://lab:1: ")
