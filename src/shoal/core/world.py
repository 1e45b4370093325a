"""A world: who takes part, with which rank, and who hands the state to whom."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Address:
    """Where a member listens for its peers; `others` are more addresses of its machine, with the same port."""

    host: str
    port: int
    others: tuple[str, ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host, *self.others)


@dataclass(frozen=True, slots=True)
class Seat:
    """One member's place in a world; its rank is its position. `speed` is what its agent guesses, 0 for unknown."""

    member: str
    incarnation: str
    address: Address
    speed: float = 0.0


@dataclass(frozen=True, slots=True)
class World:
    """A numbered, immutable membership. Numbers only grow.

    `step` is where it starts; None in a proposal, whose start its members agree on through the pulse.
    `fresh` says that nobody has trained yet: rank 0's initial state is the truth.
    `sources` maps each rank that needs the state to the rank that hands it over.
    `catching_up` are the ranks whose share of the first step is empty, because their state is still on its way.
    """

    number: int
    seats: tuple[Seat, ...]
    step: int | None
    fresh: bool = False
    sources: dict[int, int] = field(default_factory=dict)
    catching_up: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.seats)

    def ranks(self) -> dict[str, int]:
        """The rank of each member, for those who ask for many."""
        return {seat.member: rank for rank, seat in enumerate(self.seats)}

    def rank_of(self, member: str) -> int | None:
        return next((rank for rank, seat in enumerate(self.seats) if seat.member == member), None)
