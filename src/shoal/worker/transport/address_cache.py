"""Cache of the address at which each machine was reached last."""

from __future__ import annotations

from shoal.core.world import Address


class AddressCache:
    """The working host of every address that was connected to; safe to use from any thread."""

    def __init__(self) -> None:
        self._working: dict[tuple[str, ...], str] = {}

    def working_host(self, address: Address) -> str | None:
        """Return the host that worked last, or None if none has yet."""
        return self._working.get(address.hosts)

    def hosts_to_try(self, address: Address) -> tuple[str, ...]:
        """Return all hosts of an address: the one that worked last, then the others as announced."""
        working = self.working_host(address)
        return tuple(dict.fromkeys((*((working,) if working is not None else ()), *address.hosts)))

    def forget(self, address: Address) -> None:
        self._working.pop(address.hosts, None)

    def remember(self, address: Address, host: str) -> None:
        self._working[address.hosts] = host
