"""Which address of each machine led to it last."""

from __future__ import annotations

from shoal.core.world import Address


class AddressCache:
    """What was learned by dialling, for all members of a machine; any thread may ask and tell."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, ...], str] = {}

    def taken(self, address: Address) -> str | None:
        """The host that led there last, None if none has yet."""
        return self._taken.get(address.hosts)

    def in_order(self, address: Address) -> tuple[str, ...]:
        """All hosts of an address in the order to try them: the one that led there last, then as it announced them."""
        taken = self.taken(address)
        return tuple(dict.fromkeys((*((taken,) if taken is not None else ()), *address.hosts)))

    def forget(self, address: Address) -> None:
        self._taken.pop(address.hosts, None)

    def took(self, address: Address, host: str) -> None:
        self._taken[address.hosts] = host
