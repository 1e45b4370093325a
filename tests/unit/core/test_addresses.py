"""Which addresses of a machine others try, in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.addresses import Interface, candidates, host_port, is_shareable, is_shareable_name, split_list

LO = Interface("lo", ("127.0.0.1", "::1"))
ETH = Interface("eth0", ("10.0.0.2", "fd00::2"), 1000)
DOCKER = Interface("docker0", ("172.17.0.1",), 10000)

ips = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)
machines = st.lists(
    st.builds(
        Interface,
        st.sampled_from(["lo", "eth0", "ib0", "docker0", "br-1f", "wg0", "virbr0"]),
        st.lists(ips, max_size=3).map(tuple),
        st.sampled_from([0, 1000, 10_000, 100_000]),
    ),
    max_size=6,
)


def test_address_towards_the_coordinator_comes_first_and_bridges_last():
    other = Interface("eth1", ("192.168.1.2",), 1000)
    found = candidates((LO, DOCKER, other, ETH), first=("10.0.0.2",))
    assert found == ("10.0.0.2", "192.168.1.2", "fd00::2", "172.17.0.1")


def test_much_faster_network_comes_before_the_address_towards_the_coordinator():
    assert candidates((ETH, Interface("ib0", ("10.9.0.2",), 100_000)), ("10.0.0.2",))[:2] == ("10.9.0.2", "10.0.0.2")
    assert candidates((ETH, Interface("eth1", ("10.9.0.2",), 1900)), ("10.0.0.2",))[0] == "10.0.0.2"
    assert candidates((ETH, Interface("eth1", ("10.9.0.2",), 0)), ("10.0.0.2",))[0] == "10.0.0.2"


def test_loopback_and_scoped_addresses_are_never_shared():
    assert candidates((LO, Interface("eth0", ("fe80::1", "127.0.1.1", "0.0.0.0")))) == ()


def test_address_of_a_forwarder_is_kept():
    assert candidates((ETH,), first=("203.0.113.7",))[0] == "203.0.113.7"


@given(machines, st.lists(ips, max_size=2))
def test_candidates_are_own_shareable_and_unique(interfaces, first):
    found = candidates(interfaces, first)
    known = {address for one in interfaces for address in one.addresses} | set(first)
    assert len(found) == len(set(found)) <= 6
    assert set(found) <= known
    assert all(is_shareable(address) for address in found)
    usable = {address for address in known if is_shareable(address)}
    assert bool(found) == bool(usable)


@given(machines, ips.filter(is_shareable))
def test_no_container_bridge_comes_before_a_known_address(interfaces, first):
    found = candidates(interfaces, (first,))
    before = found[: found.index(first)]
    inner = {address for one in interfaces if one.is_inner for address in one.addresses}
    outer = {address for one in interfaces if not one.is_inner for address in one.addresses}
    assert not set(before) & (inner - outer)


@pytest.mark.parametrize(
    ("resolved", "good"), [((), False), (("127.0.1.1",), False), (("::1", "10.0.0.2"), False), (("10.0.0.2",), True)]
)
def test_name_that_resolves_to_loopback_is_not_shared(resolved, good):
    assert is_shareable_name(resolved) is good


def test_addresses_are_written_as_in_urls():
    assert host_port("fd00::1", 80) == "[fd00::1]:80"
    assert host_port("lab", 80) == "lab:80"
    assert split_list(" a, b,,a ") == ("a", "b")


def test_known_address_is_kept_when_faster_interfaces_fill_the_list():
    fast = tuple(Interface(f"ib{i}", (f"10.9.0.{i + 1}",), 100_000) for i in range(8))
    chosen = candidates((*fast, Interface("eth0", ("10.0.0.2",), 1000)), first=("10.0.0.2",))
    assert len(chosen) == 6
    assert chosen[-1] == "10.0.0.2"
