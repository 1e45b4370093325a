"""The URLs at which a coordinator may be reached, and the sockets behind them."""

from __future__ import annotations

import socket

import pytest

from shoal.coordinator.server import listen as server
from shoal.core.addresses import Interface
from shoal.errors import PortInUse


@pytest.fixture
def two_networks(monkeypatch):
    known = (
        Interface("lo", ("127.0.0.1",)),
        Interface("docker0", ("172.17.0.1",)),
        Interface("eth0", ("10.0.0.1", "fd00::1")),
    )
    monkeypatch.setattr(server.interfaces, "active_interfaces", lambda: known)
    monkeypatch.setattr(server.interfaces, "default_addresses", lambda: ("10.0.0.1",))
    monkeypatch.setattr(server.interfaces, "shareable_names", lambda: ("lab",))


def test_wildcard_host_is_loopback_locally_and_every_address_remotely(two_networks):
    urls = server.urls("::", 29300, secure=True)
    assert urls.local == "https://127.0.0.1:29300"
    assert urls.remote == (
        "https://10.0.0.1:29300",
        "https://[fd00::1]:29300",
        "https://172.17.0.1:29300",
        "https://lab:29300",
    )


def test_named_addresses_come_first_with_their_own_ports(two_networks):
    urls = server.urls("0.0.0.0", 29300, True, ("gateway.lab:443", "203.0.113.7", "[fd00::9]:1", "fd00::8"))
    assert urls.remote[:4] == (
        "https://gateway.lab:443",
        "https://203.0.113.7:29300",
        "https://[fd00::9]:1",
        "https://[fd00::8]:29300",
    )
    assert "https://[fd00::1]:29300" not in urls.remote, "it does not listen there"


def test_single_address_is_the_only_url():
    assert server.urls("127.0.0.1", 1, False) == server.Urls("http://127.0.0.1:1", ("http://127.0.0.1:1",))
    assert server.urls("fd00::1", 1, True).local == "https://[fd00::1]:1"


def test_both_families_share_one_port_and_a_taken_port_is_named(monkeypatch):
    monkeypatch.setattr(server, "PORT_RETRY_S", 0.0)
    sockets = server.listen("::", 0)
    port = sockets[0].getsockname()[1]
    try:
        assert {listener.getsockname()[1] for listener in sockets} == {port}
        assert [listener.family for listener in sockets] == [socket.AF_INET, socket.AF_INET6][: len(sockets)]
        with pytest.raises(PortInUse, match=str(port)):
            server.listen("::", port)
    finally:
        for listener in sockets:
            listener.close()
