"""Who is let in."""

from __future__ import annotations

import pytest

from shoal.coordinator.http import auth


@pytest.mark.parametrize("host", [b"127.0.0.1:80", b"localhost", b"localhost:9", b"[::1]:80", b"127.1.2.3"])
def test_loopback_host_is_accepted(host: bytes) -> None:
    assert auth.why_foreign(host, b"", loopback_only=True) == ""


@pytest.mark.parametrize("host", [b"", b"evil.example", b"10.0.0.1:80", b"localhost.evil.example", b"[2001:db8::1]"])
def test_other_host_is_foreign_to_a_loopback_service(host: bytes) -> None:
    assert auth.why_foreign(host, b"", loopback_only=True)


def test_origin_must_be_the_coordinator() -> None:
    assert auth.why_foreign(b"box:80", b"http://box:80", loopback_only=False) == ""
    assert auth.why_foreign(b"box:80", b"http://evil.example", loopback_only=False)
    assert auth.why_foreign(b"box:80", b"null", loopback_only=False)


def test_failed_logins_are_counted_per_client_and_expire() -> None:
    failures = auth.FailedLogins()
    assert not any(failures.too_many("a", 1.0) for _ in range(auth.MAX_FAILURES))
    assert failures.too_many("a", 1.0)
    assert not failures.too_many("b", 1.0)
    assert not failures.too_many("a", 1.0 + auth.WINDOW_S + 1.0)
