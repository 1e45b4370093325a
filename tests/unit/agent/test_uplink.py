"""Addresses and rejections of a coordinator."""

from __future__ import annotations

import pytest

from shoal.agent.uplink import _websocket_url, rejection_error
from shoal.errors import CoordinatorUnreachable, MembershipError, WrongToken
from shoal.wire.protocol import RejectedMsg


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://h:7077", "ws://h:7077/v1/agent"),
        ("https://h:7077/", "wss://h:7077/v1/agent"),
        ("https://h/base/", "wss://h/base/v1/agent"),
    ],
)
def test_url_becomes_the_websocket_address(url: str, target: str) -> None:
    assert _websocket_url(url) == target


@pytest.mark.parametrize("url", ["nonsense", "ftp://h:1", "http://", "http://h:99999999", "http://h:0"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(CoordinatorUnreachable, match="invalid URL"):
        _websocket_url(url)


def test_rejection_becomes_the_error_of_its_code() -> None:
    assert type(rejection_error(RejectedMsg(WrongToken.code, "no", "", ""))) is WrongToken
    assert type(rejection_error(RejectedMsg("S299", "no", "", ""))) is MembershipError
