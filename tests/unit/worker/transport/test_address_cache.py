from __future__ import annotations

from shoal.core.world import Address
from shoal.worker.transport.address_cache import AddressCache

ADDRESS = Address("10.0.0.1", 4000, ("10.0.0.2", "10.0.0.3"))


def test_host_that_worked_is_tried_first_and_all_others_follow() -> None:
    cache = AddressCache()
    assert cache.hosts_to_try(ADDRESS) == ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    cache.remember(ADDRESS, "10.0.0.3")
    assert cache.working_host(ADDRESS) == "10.0.0.3"
    assert cache.hosts_to_try(ADDRESS) == ("10.0.0.3", "10.0.0.1", "10.0.0.2")


def test_machine_is_known_by_its_hosts_whatever_the_port() -> None:
    cache = AddressCache()
    cache.remember(ADDRESS, "10.0.0.2")
    assert cache.working_host(Address("10.0.0.1", 5000, ("10.0.0.2", "10.0.0.3"))) == "10.0.0.2"
    assert cache.working_host(Address("10.0.0.9", 4000)) is None


def test_forgotten_host_loses_its_place() -> None:
    cache = AddressCache()
    cache.remember(ADDRESS, "10.0.0.3")
    cache.forget(ADDRESS)
    cache.forget(ADDRESS)
    assert cache.hosts_to_try(ADDRESS)[0] == "10.0.0.1"
